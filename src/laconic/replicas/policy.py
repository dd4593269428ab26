"""What a follower asks of a policy: when a model is exchanged, with whom, and how a result is applied."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.errors import StateError
from laconic.replicas.vector import ModelVector
from laconic.scheme import GossipScheme, OuterScheme

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


class Policy(ABC):
    """One worker's side of the exchanges of a scheme; steps are counted from 1."""

    scheme: OuterScheme | GossipScheme
    vector: ModelVector
    optimizers: list[torch.optim.Optimizer]  # that train the model
    rank: int
    num_workers: int
    shard = 0  # of a model in shards, or of a node's processes, the one that this worker has
    num_dense = 0  # entries that an all-reduce of the same model would exchange
    error: BaseException | None = None  # what went wrong in another thread
    closed = False

    def raise_error(self) -> None:
        """Raise what went wrong in another thread."""
        if self.error is not None:
            raise self.error

    @abstractmethod
    def apply_due_(self, step: int) -> None:
        """Move the model by the pending updates that are due."""

    @abstractmethod
    def send_due(self, step: int) -> None:
        """Send what is due, and wait as the scheme says."""

    @abstractmethod
    def settle(self, step: int) -> None:
        """Wait until nothing is pending anywhere, and apply it; a call that all workers make."""

    @abstractmethod
    def average_(self, step: int) -> None:
        """Give every worker the mean of all models; a call that all workers make."""

    @abstractmethod
    def measured_mean(self, step: int) -> Tensor:
        """The mean of all models, not counted; a call that all workers make."""

    @abstractmethod
    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The same numbers of all workers that are there, in rank order, not counted; a call that all make."""

    @abstractmethod
    def stats(self, num_steps: int, *, ages: bool) -> dict[str, Any]:
        """The fields of FollowerStats that this policy counts, over so many steps."""

    @abstractmethod
    def totals(self) -> dict[str, float]:
        """What it has counted so far, by the names of Follower.metrics(): numbers that are on the host."""

    @property
    @abstractmethod
    def num_members(self) -> int:
        """The workers that are known to be there, this one among them."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it keeps from step to step, as plain tensors and numbers."""

    @abstractmethod
    def load_state_dict(self, states: Sequence[State], own: State | None) -> None:
        """Go on from this rank's state among those of all, or without one of its own."""

    @abstractmethod
    def close(self) -> None:
        """End its threads and connections."""

    def check_replicas_(self) -> None:
        """Compare what all workers should have alike; nothing, where each has its own."""
        return

    def server_stats(self) -> list[dict[str, Any]]:
        """What each dedicated server counted so far; a call that all make."""
        return []
