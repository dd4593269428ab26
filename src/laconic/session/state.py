"""A session's state in a checkpoint: plain tensors, numbers and texts, which weights_only loading takes."""

import io
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.errors import FrameError, StateError
from laconic.layout import Bucket, Layout
from laconic.scheme import Scheme
from laconic.transport import Everyone, Transport, pack, unpack, world

_log = logging.getLogger("laconic.session")

_FORMAT = 1
_FIELDS = {"scheme", "step", "skipped_steps", "rank", "num_workers", "buckets", "memory"}

Kept = dict[str, dict[str, Tensor]]  # by kind and parameter


@dataclass(frozen=True)
class Progress:
    """The progress of a session."""

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
    """This worker's progress, and what it kept.

    What a worker kept that died before the save is gone with it: whoever takes its place starts with nothing.
    """
    _check(states, scheme)
    num_saved = int(states[0]["num_workers"])
    num_living = int(states[0].get("num_living", num_saved))
    are_all = len({state["rank"] for state in states}) == num_living
    own = [state for state in states if state["rank"] % transport.num_workers == transport.rank]
    if num_saved == transport.num_workers:
        if not own and not are_all:
            raise StateError(
                f"no state of rank {transport.rank} is among those given; load what this rank saved, or save one file "
                "with session.gather_state() and load it with scatter_state()"
            )
    else:
        if not are_all:
            raise StateError(
                f"the state is of one of {num_saved} workers, now there are {transport.num_workers}; "
                f"give load_state_dict a list of all {num_living} states"
            )
        if transport.rank == 0 and scheme.memory.kinds:
            _log.warning(
                f"what {num_saved} workers kept now lies with {transport.num_workers}; "
                "the sum over workers is unchanged"
            )
    if transport.rank == 0 and states[0]["scheme"] != str(scheme):
        _log.warning("the state was saved under %s; %s continues with what that kept", states[0]["scheme"], scheme)
    layouts = [Layout.of(list(bucket), list(bucket.values())) for bucket in states[0]["buckets"]]
    progress = Progress(int(states[0]["step"]), int(states[0]["skipped_steps"]), layouts)
    return progress, _sum([state["memory"] for state in own])


def by_rank(saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One worker's state, or those of all in the order of their ranks."""
    states = [saved] if isinstance(saved, Mapping) else saved
    if not isinstance(states, Sequence) or not states or not all(map(_is_state, states)):
        raise StateError(
            "this is no state of a session; load what state_dict() returned, or a list of those of all ranks"
        )
    if len({state.get("rank") for state in states}) < len(states):
        raise StateError("the state of one rank is given twice; give that of each rank once")
    return sorted(states, key=lambda state: int(state.get("rank", 0)))


def _is_state(state: object) -> bool:
    """Return whether it is a state of this format, with all that it should have, or of another one."""
    return isinstance(state, Mapping) and (state.get("format", _FORMAT) != _FORMAT or state.keys() >= _FIELDS)


def _check(states: Sequence[Mapping[str, Any]], scheme: Scheme) -> None:
    for state in states:
        if state.get("format") != _FORMAT:
            raise StateError(f"the state's format is {state.get('format')}, this version reads {_FORMAT}")
        kinds = tuple(state["memory"])
        if kinds != scheme.memory.kinds:
            raise StateError(
                f"the state was saved under {state['scheme']} and keeps {', '.join(kinds) or 'nothing'}; "
                f"{scheme} keeps {', '.join(scheme.memory.kinds) or 'nothing'}; resume under the scheme that saved it"
            )
    if len({(state["step"], state["num_workers"]) for state in states}) > 1:
        raise StateError("the states are of different steps; load states that were saved together")


def _sum(kept: Sequence[Kept]) -> Kept:
    total: Kept = {}
    for each in kept:
        for kind, tensors in each.items():
            into = total.setdefault(kind, {})
            for name, tensor in tensors.items():
                into[name] = into[name] + tensor if name in into else tensor
    return total


@contextmanager
def regrouped(buckets: Sequence[Bucket], layouts: Sequence[Layout]) -> Iterator[Sequence[Bucket]]:
    """The same gradients in buckets of the given layouts, written back on leaving; as they are if the names differ."""
    views: dict[str, Tensor] = {
        span.name: bucket.flat[span.start : span.stop] for bucket in buckets for span in bucket.layout.spans
    }
    shapes = {span.name: span.shape for bucket in buckets for span in bucket.layout.spans}
    wanted = [span for layout in layouts for span in layout.spans]
    fits = {name: view.numel() for name, view in views.items()} == {span.name: span.num_entries for span in wanted}
    if not fits or [bucket.layout for bucket in buckets] == list(layouts):
        yield buckets
        return
    shaped = [Layout.of(layout.names, [shapes[name] for name in layout.names]) for layout in layouts]
    cut = [
        Bucket(index, layout, torch.cat([views[name] for name in layout.names]), is_last=index == len(layouts) - 1)
        for index, layout in enumerate(shaped)
    ]
    yield cut
    for bucket in cut:
        for span in bucket.layout.spans:
            views[span.name].copy_(bucket.flat[span.start : span.stop])


class SavedTogether(ABC):
    """A session or a follower, with a state on every rank; `everyone` are those ranks, where they are processes."""

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
        gathered = everyone.gather(pack(self.state_dict()))
        return None if gathered is None else [_unpacked(frame, rank) for rank, frame in enumerate(gathered)]

    def scatter_state(self, states: Sequence[Mapping[str, Any]] | None) -> None:
        """Continue from what gather_state() gave, which rank 0 alone need have; a call that all make.

        Among as many ranks as saved it each receives its own state, else all receive all.
        """
        everyone = self._all_ranks()
        frames = None
        if everyone.rank == 0 and states:
            whole = len(states) == everyone.num_ranks
            frames = [pack(state) for state in states] if whole else [pack(list(states))] * everyone.num_ranks
        own = everyone.scatter(frames)
        if own is None:
            raise StateError("rank 0 gave no states; give scatter_state() there what gather_state() returned")
        self.load_state_dict(_unpacked(own, 0))

    def _all_ranks(self) -> Everyone:
        if self.everyone is None:
            raise StateError("these workers are no processes; save state_dict() of each")
        return self.everyone


def _unpacked(frame: Tensor, rank: int) -> Any:
    try:
        return unpack(frame)
    except FrameError as error:
        raise FrameError(f"rank {rank} {error}") from None


class RankZeroState:
    """A session as frameworks save it that ask every rank for its state and write rank 0's alone."""

    def __init__(self, session: SavedTogether) -> None:
        self._session = session

    def state_dict(self) -> list[dict[str, Any]] | None:
        """All ranks' states at rank 0, None elsewhere; a call that all make."""
        return self._session.gather_state()

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]] | None) -> None:
        """Continue from what rank 0 has; a call that all make."""
        self._session.scatter_state(saved)


class PerRankState:
    """A session or follower for dcp.save() and dcp.load(), which of equal keys save one rank's: each has its own here.

    dcp.save({"model": model, "laconic": PerRankState(session)}, checkpoint_id=folder)
    """

    def __init__(self, session: SavedTogether) -> None:
        self._session = session

    @property
    def _key(self) -> str:
        return f"rank {world().rank()}"

    def state_dict(self) -> dict[str, Any]:
        """The state in one piece, whose size need not be known to load it."""
        file = io.BytesIO()
        torch.save(self._session.state_dict(), file)
        return {self._key: file.getvalue()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from it."""
        self._session.load_state_dict(torch.load(io.BytesIO(saved[self._key]), weights_only=True))
