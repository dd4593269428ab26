"""What a follower asks of a policy: when a model is exchanged, with whom, and how a result is applied."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from laconic.replicas.state import State
from laconic.replicas.vector import ModelVector
from laconic.scheme import GossipScheme, OuterScheme


class Policy(ABC):
    """One worker's side of the exchanges of a scheme; steps are counted from 1."""

    scheme: OuterScheme | GossipScheme
    vector: ModelVector
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
