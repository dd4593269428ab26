"""What carries the bytes: processes over torch.distributed, virtual workers in one process, dedicated servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.layout import Layout
from laconic.transport.traffic import Traffic


@dataclass(frozen=True)
class Push:
    """One bucket's parts on their way to the owners of its entries."""

    layout: Layout
    step: int
    bucket: int
    parts: Sequence[Tensor]  # part p (bytes, uint8) goes to owner p
    longest: Sequence[int]  # no part for owner p, nor what it answers, has more bytes than longest[p]


class Transport(Protocol):
    """One worker's end of a network; every worker makes the same calls in the same order."""

    rank: int
    num_workers: int
    num_shares: int  # owners who answer for the entries of a bucket, each for its share
    owned_share: int | None  # the one that this worker answers for
    has_servers: ClassVar[bool] = False  # whether workers reach each other through dedicated servers alone
    wire: torch.device | None  # where frames are written and read; None: where the gradients are
    traffic: Traffic

    @property
    def num_living(self) -> int:
        """The workers that are still there; all of them where none can be lost."""
        return self.num_workers

    @property
    def place(self) -> int:
        """This worker's among those that are still there."""
        return self.rank

    @property
    def was_late(self) -> bool:
        """Whether what was last heard was agreed on without this worker; never where all wait for each other."""
        return False

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        """Replace `tensor` by the sum over all workers, bit-equal on each."""

    def sum_gradients_(self, tensor: Tensor, kind: str) -> None:
        """The same of a step's gradients: added as DDP adds them, bit for bit, and with no wait for overdue workers."""
        self.all_reduce_(tensor, kind)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the workers that are still there, on the CPU; of a few numbers that are no gradients."""

    def server_stats(self) -> list[dict[str, Any]]:
        """What each dedicated server counted so far; a call that all workers make."""
        return []

    def broadcast(self, frame: Tensor | None, speaker: int, longest: int) -> Tensor:
        """What one worker says to all, in at most so many bytes: its `frame`, else None; empty where it is gone."""

    @property
    def pull_turn(self) -> int:
        """How many turns after a push its answers are pulled: owners have one to find theirs in."""
        return 2

    def push(self, push: Push) -> dict[int, Tensor]:
        """Give every owner its part; those for the share that this worker owns, by rank, none where it owns none."""

    def pull(self, push: Push, own: Tensor | None) -> list[Tensor]:
        """Every owner's answer to the parts it heard, the same on all workers; `own` is this worker's for its share."""

    def catch_up(self) -> None:
        """Take what has come: nobody is to wait until this worker has more to say, or asks for it."""
        return

    def hang_up(self) -> None:
        """Let nobody wait for what this worker was to say: it has failed."""
        return

    def owner_states(self) -> list[bytes]:
        """What owners that are no workers keep, for a checkpoint, told to one of the workers; [] where workers own."""
        return []

    def load_owner_states(self, states: Sequence[bytes]) -> None:
        """Give owners that are no workers back what they kept; nothing where workers own."""
        return

    def close(self) -> None:
        """Say no more."""
        return


@runtime_checkable
class Collectives(Transport, Protocol):
    """A transport on which workers also hear each other, without anyone between them."""

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        """Everyone's frame in rank order, as (num_workers, len(frame)); frames have equal lengths."""

    def tell_all(self, card: Tensor) -> Tensor:
        """Everyone's few bytes in rank order, on the host, beside what is exchanged."""
        return self.all_gather(card, "addresses")

    def total(self, tensor: Tensor) -> Tensor:
        with self.traffic.uncounted():
            rows = self.tell_all(tensor.contiguous().view(-1).view(torch.uint8))
        return rows.view(tensor.dtype).sum(0).view(tensor.shape)

    def all_to_all(self, rows: Tensor, kind: str) -> Tensor:
        """Row r of `rows` (num_workers, n) goes to worker r; returns the rows for this one, in rank order."""

    def swap(self, frame: Tensor, peer: int, kind: str, num_back: int) -> Tensor:
        """Give `frame` to `peer`, who makes the same call, and get its frame of so many elements; either may be empty.

        With oneself nothing is sent.
        """
