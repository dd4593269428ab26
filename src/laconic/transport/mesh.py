"""A connection of our own between every two workers, and messages to all of them at once.

Gloo passes frames on around a ring, a peer at a time: 73 % of a 1gbit link for frames of 190 kB between 2 hosts, where
this fills 96 % (link-use in docs/results.md).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from laconic.errors import FrameError, PeerError
from laconic.transport.connection import Connection
from laconic.transport.door import TellAll, meet
from laconic.transport.moving import Deadline, Flow, add_up_, adds_natively, move
from laconic.transport.transport import Push

_LENGTH_BYTES = 8  # before a message whose length only its sender knows


class Mesh:
    """One worker's connections to all others, used by one thread at a time; messages are uint8 on the host.

    Everything goes to all peers, and comes from all of them, at once, so that no link waits for another one. A worker
    that fails hangs up, and so do those who wait for it.
    """

    def __init__(self, rank: int, links: Mapping[int, Connection], timeout_s: float) -> None:
        self.rank = rank
        self._links = links
        self._timeout_s = timeout_s
        for link in links.values():
            link.set_timeout(0)  # whoever waits, waits for all of them

    def all_gather(self, frame: Tensor, rows: Tensor) -> None:
        """Fill `rows` with everyone's frame, in rank order."""
        self.all_to_all(frame.expand_as(rows), rows)

    def all_to_all(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Give row r of `outgoing` to worker r, and fill row r of `incoming` with what that one gives."""
        incoming[self.rank] = outgoing[self.rank]
        self._swap([_view(row) for row in outgoing], [_view(row) for row in incoming])

    def add_up_(self, vector: Tensor) -> None:
        """Overwrite a vector with its sum over all workers: each adds up a share, in rank order, and tells all.

        Shares differ by an entry at most, and lie where they are: two hops, where a ring of M workers takes 2*(M-1).
        """
        if adds_natively(vector.dtype):
            add_up_(vector, self.rank, self._links, self._timeout_s)
            return
        num_workers = len(self._links) + 1
        shares = vector.tensor_split(num_workers)
        mine = shares[self.rank]
        rows = mine.new_empty(num_workers, mine.numel())
        self._swap([_view(share) for share in shares], [_view(row) for row in rows])
        rows[self.rank] = mine
        mine.copy_(rows[0])
        for row in rows[1:]:
            mine.add_(row)
        self._swap([_view(mine)] * num_workers, [_view(share) for share in shares])

    def push_pull(self, push: Push) -> tuple[list[Tensor], list[int]]:
        """The answers of all owners, and how many bytes of parts each worker sent here, by rank."""
        assert push.answer is not None
        try:
            heard = {self.rank: push.parts[self.rank]}
            arriving = self._exchange_any(push.parts, push.longest[self.rank], heard)
            try:
                own = push.answer((peer, heard[peer]) for peer in arriving)
            except Exception:
                with suppress(PeerError):
                    deque(arriving, maxlen=0)  # others wait for the parts that still have to leave
                raise
            answers = {self.rank: own}
            deque(self._exchange_any([own] * len(push.parts), max(push.longest), answers), maxlen=0)
        except Exception:
            self.shut_down()
            raise
        in_order = [answers[rank] for rank in range(len(push.parts))]
        for rank, answer in answers.items():
            if answer.numel() > push.longest[rank]:
                raise _too_long(rank, answer.numel(), push.longest[rank])
        return in_order, [heard[rank].numel() for rank in range(len(push.parts))]

    def _swap(self, outgoing: Sequence[memoryview], incoming: Sequence[memoryview]) -> None:
        """Give each other worker its part, and fill its room; by rank."""
        said = {peer: [outgoing[peer]] for peer in self._links}
        rooms = {peer: iter([incoming[peer]]) for peer in self._links}
        deque(self._exchange(said, rooms, as_they_come=False), maxlen=0)

    def _exchange_any(self, said: Sequence[Tensor], longest: int, heard: dict[int, Tensor]) -> Iterator[int]:
        """Messages of lengths that only senders know; yields this worker, then each whose message is in `heard`."""
        outgoing = {peer: [_length(said[peer]), _view(said[peer])] for peer in self._links}
        rooms = {peer: _of_any_length(peer, longest, heard) for peer in self._links}
        yield self.rank
        yield from self._exchange(outgoing, rooms, as_they_come=True)

    def _exchange(
        self,
        outgoing: Mapping[int, Iterable[memoryview]],
        rooms: Mapping[int, Iterator[memoryview]],
        *,
        as_they_come: bool,
    ) -> Iterator[int]:
        """Send and receive until all is done; yields each peer that has filled its rooms, at once or at the end.

        The peer ahead comes first: everyone begins with another one, and no link is asked by all at once.
        """
        deadline = Deadline(self._timeout_s)
        flows = {peer: Flow(self._links[peer], iter(outgoing[peer]), rooms[peer]) for peer in self._ahead()}
        reading = {peer for peer, flow in flows.items() if flow.into.view}
        while flows := {peer: flow for peer, flow in flows.items() if not flow.is_through}:
            move(flows, deadline, until_any=as_they_come)
            heard = {peer for peer in reading if not flows[peer].into.view}
            reading -= heard
            yield from sorted(heard)

    def _ahead(self) -> list[int]:
        """The others, from the next one on."""
        num_workers = len(self._links) + 1
        return [(self.rank + hop) % num_workers for hop in range(1, num_workers)]

    def shut_down(self) -> None:
        """Hang up: whoever waits for this worker finds that out."""
        for link in self._links.values():
            link.shut_down()

    def close(self) -> None:
        """Give the sockets back."""
        self.shut_down()
        for link in self._links.values():
            link.close()


def open_mesh(rank: int, num_workers: int, tell_all: TellAll, timeout_s: float) -> Mesh:
    """Connections among all workers; a call that all of them make, and LaunchError on all where one cannot."""
    to, of = meet(rank, tell_all, calls=range(rank), awaits=range(rank + 1, num_workers))
    return Mesh(rank, to | of, timeout_s)


def _of_any_length(sender: int, longest: int, heard: dict[int, Tensor]) -> Iterator[memoryview]:
    """Room for a length, then for as many bytes, which become heard[sender]."""
    head = bytearray(_LENGTH_BYTES)
    yield memoryview(head)
    length = int.from_bytes(head, "little", signed=True)
    if not 0 <= length <= longest:
        raise _too_long(sender, length, longest)
    heard[sender] = torch.empty(length, dtype=torch.uint8)
    yield _view(heard[sender])


def _too_long(sender: int, length: int, longest: int) -> FrameError:
    return FrameError(f"a message from rank {sender} says it has {length} bytes of {longest}; nothing is applied")


def _length(message: Tensor) -> memoryview:
    return memoryview(bytearray(message.numel().to_bytes(_LENGTH_BYTES, "little")))


def _view(message: Tensor) -> memoryview:
    return message.view(-1).view(torch.uint8).numpy().data
