"""Launch recipes: SLURM's script with its commands simulated, and a manifest that parses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.workers import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
# Two nodes of one machine: each runs what it is told, and the script waits for both.
COMMANDS = {
    "scontrol": '#!/bin/bash\n[ "$*" = "show hostnames node[1-2]" ] && printf "127.0.0.1\\n127.0.0.1\\n"\n',
    "srun": '#!/bin/bash\n"$@" & first=$!\n"$@" & second=$!\nwait $first && wait $second\n',
}


def test_the_slurm_script_starts_one_group(tmp_path: Path) -> None:
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    here = os.environ | {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", str(EXAMPLES / "launch" / "slurm.sh"), str(EXAMPLES / "with_ddp.py")]
    ran = subprocess.run(command, env=here, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("20 steps (0 skipped), 2 workers") == 2


def _manifest() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / "launch" / "pytorchjob.yaml").read_text())
    return job


def test_the_manifest_is_one() -> None:
    job = _manifest()
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert job["kind"] == "PyTorchJob" and set(replicas) == {"Master", "Worker"}
    assert all(one["template"]["spec"]["containers"][0]["name"] == "pytorch" for one in replicas.values())


def test_the_manifest_fits_its_schema() -> None:
    """The operator's own classes, made from its schema, take all that it says and lack nothing."""
    kubeflow = pytest.importorskip("kubeflow.training", reason="needs `pip install kubeflow-training`")
    client = kubeflow.ApiClient()
    job = client.deserialize(SimpleNamespace(data=json.dumps(_manifest())), "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(job) == _manifest()  # what is unknown would be dropped
