"""A follower's state in a checkpoint: plain tensors, numbers and texts, by parameter name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from laconic.errors import StateError
from laconic.scheme import OuterScheme, write_part

_FORMAT = "outer-1"


@dataclass(frozen=True)
class Progress:
    """How far a follower has come."""

    steps: int
    turns: int
    skipped: int
    late: int


def save(scheme: OuterScheme, rank: int, num_workers: int, share: int, progress: Progress) -> dict[str, Any]:
    """What every state says of itself."""
    return {
        "format": _FORMAT,
        "scheme": str(scheme),
        "trigger": write_part("trigger", scheme.when),
        "rank": rank,
        "num_workers": num_workers,
        "share": share,  # of the processes of a node, each of which is a rank among its counterparts
        "step": progress.steps,
        "turns": progress.turns,
        "skipped": progress.skipped,
        "late": progress.late,
    }


def load(
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], scheme: OuterScheme, rank: int, num_workers: int, share: int
) -> tuple[list[Mapping[str, Any]], Mapping[str, Any], Progress]:
    """(all states that are given, the one to go on from, how far it had come).

    Among another number of workers whoever has no state of its own goes on from the first one's.
    """
    states = [saved] if isinstance(saved, Mapping) else list(saved)
    states = [found for found in states if found.get("share", share) == share] or states
    if any(found.get("format") != _FORMAT for found in states):
        raise StateError("this is no state of a follower in rounds; load what OuterFollower.state_dict() gave")
    if len({(found["step"], found["num_workers"]) for found in states}) > 1:
        raise StateError("the states are of different steps; load states that were saved together")
    num_saved = states[0]["num_workers"]
    if num_saved != num_workers and len(states) != num_saved:
        raise StateError(
            f"the state is of one of {num_saved} workers, now there are {num_workers}; give load_state_dict a list of "
            f"all {num_saved} states"
        )
    mine = [found for found in states if found["rank"] == rank]
    if not mine and num_saved == num_workers:
        raise StateError(f"no state of rank {rank} is among those given; load what this rank saved")
    own = mine[0] if mine else states[0]
    if own["under_way"] and own["trigger"] != write_part("trigger", scheme.when):
        raise StateError(f"results of trigger={own['trigger']} are under way in the state; resume with that trigger")
    return states, own, Progress(own["step"], own["turns"], own["skipped"], own.get("late", 0))


def save_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Any]:
    """An optimizer's state by the name of the parameter that it is about, on the host."""
    saved = optimizer.state_dict()
    by_name = {names[index]: kept for index, kept in saved["state"].items()}
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in saved["param_groups"]]
    return {"state": _on_host(by_name), "param_groups": groups}


def load_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str], saved: Mapping[str, Any]) -> None:
    """Go on from what `save_optimizer` gave."""
    index_of = {name: index for index, name in enumerate(names)}
    if unknown := set(saved["state"]) - set(index_of):
        raise StateError(
            f"the state holds {min(unknown)!r}, which the model does not; load the state of the same model"
        )
    groups = [{**group, "params": [index_of[name] for name in group["params"]]} for group in saved["param_groups"]]
    by_index = {index_of[name]: kept for name, kept in saved["state"].items()}
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def _on_host(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to("cpu", copy=True)
    return {key: _on_host(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
