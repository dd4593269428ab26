"""Transports carry the bytes: processes over torch.distributed, virtual workers in one process, dedicated servers.

Workers agree on something small over one: each receives every vector, and combines them alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.layout import Layout
from laconic.transport.traffic import Traffic

# What a worker may send to all others at once: one hop instead of the 2*(M-1) of a ring. At 1 ms one way among 4
# workers over Gloo that is 5.5 ms instead of 26.6 for the 2,344 norms of a small net; beyond, bytes count for more.
_DIRECT_BYTES = 49_152


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
        """The number of workers that are still there; all of them where none can be lost."""
        return self.num_workers

    @property
    def place(self) -> int:
        """This worker's among those that are still there."""
        return self.rank

    @property
    def world_ranks(self) -> Sequence[int]:
        """The ranks of the workers in the world, by which errors name them."""
        return range(self.num_workers)

    @property
    def was_late(self) -> bool:
        """Return whether the last answer was found without this worker; never where all wait for each other."""
        return False

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        """Replace `tensor` by the sum over all workers, bit-equal on each."""

    def sum_gradients_(self, tensor: Tensor, kind: str) -> None:
        """The same of a step's gradients: added as DDP adds them, bit for bit, and with no wait for overdue workers."""
        self.all_reduce_(tensor, kind)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the workers that are still there, on the CPU; of a few numbers that are no gradients."""

    def server_stats(self) -> list[dict[str, Any]]:
        """The counts of each dedicated server so far; a call that all workers make."""
        return []

    def broadcast(self, frame: Tensor | None, speaker: int, longest: int) -> Tensor:
        """The frame of one worker, of at most so many bytes, on all; the others give None. Empty where it is gone."""

    @property
    def pull_delay(self) -> int:
        """The number of messages between a push and its pull: owners have one in which to compute their answers."""
        return 2

    def push(self, push: Push) -> dict[int, Tensor]:
        """Send every owner its part; returns those for the share that this worker owns, by rank, if it owns one."""

    def pull(self, push: Push, own: Tensor | None) -> list[Tensor]:
        """Every owner's answer to the parts it received, the same on all workers; `own` is this worker's own."""

    def receive_pending(self) -> None:
        """Take what has come, so that a sender need not wait until this worker sends more, or asks for it."""
        return

    def shut_down(self) -> None:
        """Close all connections, since this worker has failed: nobody is to wait for its next message."""
        return

    def owner_states(self) -> list[bytes]:
        """The states of owners that are no workers, for a checkpoint, at one of the workers; [] where workers own."""
        return []

    def load_owner_states(self, states: Sequence[bytes]) -> None:
        """Give owners that are no workers back what they kept; nothing where workers own."""
        return

    def close(self) -> None:
        """Give connections and threads back."""
        return


@runtime_checkable
class Collectives(Transport, Protocol):
    """A transport on which workers also receive from each other, without a server between them."""

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        """Everyone's frame in rank order, as (num_workers, len(frame)); frames have equal lengths."""

    def gather_small(self, card: Tensor) -> Tensor:
        """Everyone's few bytes in rank order, on the host, beside what is exchanged."""
        return self.all_gather(card, "addresses")

    def total(self, tensor: Tensor) -> Tensor:
        with self.traffic.uncounted():
            rows = self.gather_small(tensor.contiguous().view(-1).view(torch.uint8))
        return rows.view(tensor.dtype).sum(0).view(tensor.shape)

    def all_to_all(self, rows: Tensor, kind: str) -> Tensor:
        """Row r of `rows` (num_workers, n) goes to worker r; returns the rows for this one, in rank order."""

    def sendrecv(self, frame: Tensor, peer: int, kind: str, num_back: int) -> Tensor:
        """Send `frame` to `peer`, which makes the same call; returns its frame of so many elements. Both may be empty.

        With oneself nothing is sent.
        """


def agree(transport: Collectives, own: Tensor, combine: Callable[[Tensor], Tensor], kind: str) -> Tensor:
    """combine(everyone's vectors as (M, n)), the same on every worker; it must act entry by entry.

    A longer vector is combined in shares, one by each worker, which sends it to all: the bytes of a ring.
    """
    num_workers = transport.num_workers
    count = own.numel()
    if not count:  # of which bytes are no view
        return own
    if (num_workers - 1) * own.nbytes <= _DIRECT_BYTES:
        return combine(_all_to_all(transport, own.expand(num_workers, count).contiguous(), kind))
    rows = own.new_zeros(num_workers, _share(count, num_workers))
    rows.view(-1)[:count] = own
    share = combine(_all_to_all(transport, rows, kind))
    gathered = transport.all_gather(share.view(torch.uint8), kind)
    return gathered.view(-1).view(own.dtype)[:count]


def agreement_bytes(count: int, item_bytes: int, num_workers: int) -> int:
    """The bytes that leave each of M workers that agree on a vector of `count`."""
    direct = (num_workers - 1) * count * item_bytes
    if direct <= _DIRECT_BYTES:
        return direct
    return 2 * (num_workers - 1) * _share(count, num_workers) * item_bytes


class Adding(Protocol):
    """Workers that can add something up, among which this one knows its place."""

    @property
    def place(self) -> int: ...

    @property
    def num_living(self) -> int: ...

    def total(self, tensor: Tensor) -> Tensor: ...


def rows_of(workers: Adding, own: Sequence[float]) -> list[list[float]]:
    """The same numbers of all that are there, by place: the sum of tables of which each worker fills its own row.

    A row begins and ends with a mark, since a worker that has died leaves zeros: none is there, or, where it died
    between its messages to two servers, one of the two.
    """
    table = torch.zeros(workers.num_living, len(own) + 2, dtype=torch.float64)
    table[workers.place] = torch.tensor([1.0, *own, 1.0], dtype=torch.float64)
    rows: list[list[float]] = workers.total(table).tolist()
    return [row[1:-1] for row in rows if row[0] and row[-1]]


def _share(count: int, num_workers: int) -> int:
    return -(-count // num_workers)


def _all_to_all(transport: Collectives, rows: Tensor, kind: str) -> Tensor:
    """As bytes: not every backend knows every type."""
    return transport.all_to_all(rows.view(torch.uint8), kind).view(rows.dtype)
