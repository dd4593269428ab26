"""A session's state in a checkpoint: plain tensors, numbers and texts, which weights_only loading takes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from laconic.errors import StateError
from laconic.exchange import Medium
from laconic.layout import Layout
from laconic.scheme import Scheme

_FORMAT = 1

Kept = dict[str, dict[str, Tensor]]


def save(
    scheme: Scheme, medium: Medium, step: int, skipped_steps: int, layouts: Sequence[Layout], kept: Kept
) -> dict[str, Any]:
    """One worker's state."""
    return {
        "format": _FORMAT,
        "scheme": str(scheme),
        "step": step,
        "skipped_steps": skipped_steps,
        "rank": medium.rank,
        "num_workers": medium.num_workers,
        "buckets": [{span.name: span.num_entries for span in layout.spans} for layout in layouts],
        "memory": kept,
    }


def load(
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], scheme: Scheme, medium: Medium
) -> tuple[int, int, list[Layout], Kept]:
    """(steps, skipped steps, layouts of the last step, kept tensors) for this worker."""
    states = [saved] if isinstance(saved, Mapping) else sorted(saved, key=lambda s: int(s["rank"]))
    _check(states, scheme)
    num_saved = int(states[0]["num_workers"])
    if num_saved == medium.num_workers:
        mine = [s for s in states if s["rank"] == medium.rank]
        if not mine:
            raise StateError(f"no state of rank {medium.rank} is among those given; load what this rank saved")
    else:
        if [s["rank"] for s in states] != list(range(num_saved)):
            raise StateError(
                f"the state is of one of {num_saved} workers, now there are {medium.num_workers}; "
                f"give load_state_dict a list of all {num_saved} states"
            )
        mine = [s for s in states if s["rank"] % medium.num_workers == medium.rank]
        if medium.rank == 0 and scheme.memory.kinds:
            warnings.warn(
                f"what {num_saved} workers kept now lies with {medium.num_workers}; the sum over workers is unchanged",
                stacklevel=4,
            )
    layouts = [Layout.of(list(bucket), list(bucket.values())) for bucket in states[0]["buckets"]]
    return int(states[0]["step"]), int(states[0]["skipped_steps"]), layouts, _sum([s["memory"] for s in mine])


def _check(states: Sequence[Mapping[str, Any]], scheme: Scheme) -> None:
    for found in states:
        if found.get("format") != _FORMAT:
            raise StateError(f"the state's format is {found.get('format')}, this version reads {_FORMAT}")
        kinds = tuple(found["memory"])
        if kinds != scheme.memory.kinds:
            raise StateError(
                f"the state was saved under {found['scheme']} and keeps {', '.join(kinds) or 'nothing'}; "
                f"{scheme} keeps {', '.join(scheme.memory.kinds) or 'nothing'}; resume under the scheme that saved it"
            )
    if len({(found["step"], found["num_workers"]) for found in states}) > 1:
        raise StateError("the states are of different steps; load states that were saved together")


def _sum(kept: Sequence[Kept]) -> Kept:
    total: Kept = {}
    for one in kept:
        for kind, tensors in one.items():
            into = total.setdefault(kind, {})
            for name, tensor in tensors.items():
                into[name] = into[name] + tensor if name in into else tensor
    return total
