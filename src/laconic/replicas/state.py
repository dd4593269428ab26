"""A follower's state in a checkpoint: plain tensors, numbers and texts; one format for all policies."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from laconic.errors import StateError

_VERSION = 1
State = Mapping[str, Any]


def header(scheme: object, step: int, rank: int, num_workers: int, shard: int) -> dict[str, Any]:
    """What every state says of itself."""
    return {
        "follower": _VERSION,
        "scheme": str(scheme),
        "step": step,
        "rank": rank,
        "num_workers": num_workers,
        "shard": shard,  # of a model, or of a node's processes, each of which is a rank among its counterparts
    }


def states_of(
    saved: State | Sequence[State], rank: int, num_workers: int, shard: int
) -> tuple[list[State], State | None]:
    """(all states that are given, this rank's among them if there is one); those of other shards are left out.

    Raises:
        StateError: Something else than states of followers of this version is given, or another rank's alone.
    """
    states = [saved] if isinstance(saved, Mapping) else list(saved)
    if not states or any(state.get("follower") != _VERSION for state in states):
        raise StateError("this is no state of a follower of this version; load what Follower.state_dict() gave")
    states = [state for state in states if state["shard"] == shard] or states
    own = next((state for state in states if state["rank"] == rank), None)
    if own is None and isinstance(saved, Mapping) and saved["num_workers"] == num_workers:
        raise StateError(f"no state of rank {rank} is among those given; load what this rank saved")
    return states, own


def on_host(tree: Any) -> Any:
    """A copy of a state, with its tensors on the host."""
    if isinstance(tree, torch.Tensor):
        return tree.to("cpu", copy=True)
    return {key: on_host(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
