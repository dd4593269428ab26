"""All workers' states in one place, for who saves on one rank alone."""

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.errors import StateError
from laconic.transport import Everyone


class CanGather(Protocol):
    """What is asked of a session, or of a follower."""

    def gather_state(self) -> list[dict[str, Any]] | None:
        """All ranks' states at rank 0, None elsewhere; a call that all make."""

    def scatter_state(self, states: Sequence[Mapping[str, Any]] | None) -> None:
        """Continue from what rank 0 has; a call that all make."""


class SavedTogether(ABC):
    """Whoever has a state on every rank; `everyone` are those ranks, where they are processes."""

    everyone: Everyone | None = None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This worker's state, to be saved per rank."""

    @abstractmethod
    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from this rank's state, or from a list of all ranks' states."""

    def gather_state(self) -> list[dict[str, Any]] | None:
        """All ranks' states at rank 0, as load_state_dict takes them, None elsewhere; a call that all make."""
        everyone = self._all_ranks()
        gathered = everyone.gather(_packed(self.state_dict()))
        return None if gathered is None else [_unpacked(frame) for frame in gathered]

    def scatter_state(self, states: Sequence[Mapping[str, Any]] | None) -> None:
        """Continue from what gather_state() gave, which rank 0 alone need have; a call that all make.

        Among as many ranks as saved it each hears its own state, else all hear all.
        """
        everyone = self._all_ranks()
        frames = None
        if everyone.rank == 0 and states:
            whole = len(states) == everyone.num_ranks
            frames = [_packed(one) for one in states] if whole else [_packed(list(states))] * everyone.num_ranks
        mine = everyone.scatter(frames)
        if mine is None:
            raise StateError("rank 0 gave no states; give scatter_state() there what gather_state() returned")
        self.load_state_dict(_unpacked(mine))

    def _all_ranks(self) -> Everyone:
        if self.everyone is None:
            raise StateError("these workers are no processes; save state_dict() of each")
        return self.everyone


class Gathered:
    """A session as frameworks save it that ask every rank for its state and write rank 0's alone."""

    def __init__(self, session: CanGather) -> None:
        self._session = session

    def state_dict(self) -> list[dict[str, Any]] | None:
        """All ranks' states at rank 0, None elsewhere; a call that all make."""
        return self._session.gather_state()

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]] | None) -> None:
        """Continue from what rank 0 has; a call that all make."""
        self._session.scatter_state(saved)


def _packed(state: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpacked(frame: Tensor) -> Any:
    return torch.load(io.BytesIO(frame.numpy().data), weights_only=True, map_location="cpu")
