"""What was run, as a fact for the records."""

from __future__ import annotations

from typing import Any

from laconic.measure.lab import LabSpec
from laconic.measure.tasks import TASKS
from laconic.measure.train import Job


def setting(job: Job, spec: LabSpec | None, *, rounds: int, steps: int, target: float | None) -> dict[str, Any]:
    """The facts that head a comparison's records; hosts and link are None outside a lab."""
    return {
        **job.facts(),
        "steps": steps,
        "batch": job.batch or TASKS[job.task].batch,
        "workers": spec.hosts - job.servers if spec else job.workers,
        "hosts": spec.hosts if spec else None,
        "link": str(spec.link) if spec else None,
        "link_of": {str(host): str(link) for host, link in spec.link_of.items()} if spec else {},
        "rounds": rounds,
        "target": target,
    }
