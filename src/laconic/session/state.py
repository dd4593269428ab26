"""A session's state in a checkpoint: plain tensors, numbers and texts, which weights_only loading takes."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laconic.errors import StateError
from laconic.layout import Layout
from laconic.scheme import Scheme
from laconic.transport import Transport

_FORMAT = 1

Kept = dict[str, dict[str, Tensor]]  # by kind and parameter


@dataclass(frozen=True)
class Progress:
    """How far a session has come."""

    step: int
    skipped_steps: int
    layouts: list[Layout]  # of the last step's buckets


def save(scheme: Scheme, transport: Transport, progress: Progress, kept: Kept) -> dict[str, Any]:
    """One worker's state, with room for what a path keeps."""
    return {
        "format": _FORMAT,
        "scheme": str(scheme),
        "step": progress.step,
        "skipped_steps": progress.skipped_steps,
        "rank": transport.rank,
        "num_workers": transport.num_workers,
        "num_living": transport.num_living,
        "buckets": [{span.name: span.num_entries for span in layout.spans} for layout in progress.layouts],
        "memory": kept,
        "past": {},
        "owner": {},
    }


def load(states: Sequence[Mapping[str, Any]], scheme: Scheme, transport: Transport) -> tuple[Progress, Kept]:
    """How far this worker had come, and what it kept.

    What a worker kept that died before the save is gone with it: whoever takes its place starts with nothing.
    """
    _check(states, scheme)
    num_saved = int(states[0]["num_workers"])
    num_there = int(states[0].get("num_living", num_saved))
    are_all = len({state["rank"] for state in states}) == num_there
    mine = [state for state in states if state["rank"] % transport.num_workers == transport.rank]
    if num_saved == transport.num_workers:
        if not mine and not are_all:
            raise StateError(f"no state of rank {transport.rank} is among those given; load what this rank saved")
    else:
        if not are_all:
            raise StateError(
                f"the state is of one of {num_saved} workers, now there are {transport.num_workers}; "
                f"give load_state_dict a list of all {num_there} states"
            )
        if transport.rank == 0 and scheme.memory.kinds:
            warnings.warn(
                f"what {num_saved} workers kept now lies with {transport.num_workers}; "
                "the sum over workers is unchanged",
                stacklevel=4,
            )
    layouts = [Layout.of(list(bucket), list(bucket.values())) for bucket in states[0]["buckets"]]
    progress = Progress(int(states[0]["step"]), int(states[0]["skipped_steps"]), layouts)
    return progress, _sum([state["memory"] for state in mine])


def by_rank(saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One worker's state, or those of all in the order of their ranks."""
    return [saved] if isinstance(saved, Mapping) else sorted(saved, key=lambda state: int(state["rank"]))


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
