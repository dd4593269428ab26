"""A connection of our own between every two workers, and messages to all of them at once.

Gloo passes frames on around a ring, a peer at a time: 73 % of a 1gbit link for frames of 190 kB between 2 hosts, where
this fills 96 % (link-use in docs/results.md).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from laconic.transport.connection import Connection
from laconic.transport.flows import Deadline, Flow, all_reduce_, all_to_all, move
from laconic.transport.rendezvous import Gather, open_connections

_USUAL_BYTES = 1 << 16  # of a message whose length only its sender knows, until longer ones have come


class Mesh:
    """One worker's connections to all others, used by one thread at a time; messages are uint8 on the host.

    Everything goes to all peers, and comes from all of them, at once, so that no link waits for another one. A worker
    that fails closes its connections, and so do those that wait for it.
    """

    def __init__(self, rank: int, links: Mapping[int, Connection], timeout_s: float) -> None:
        self.rank = rank
        self._links = links
        self._timeout_s = timeout_s
        self._usual = _USUAL_BYTES
        for link in links.values():
            link.set_timeout(0)  # a caller waits for all of them at once

    def all_gather(self, frame: Tensor, rows: Tensor) -> None:
        """Fill `rows` with everyone's frame, in rank order."""
        self.all_to_all(frame.expand_as(rows), rows)

    def all_to_all(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Send row r of `outgoing` to worker r, and fill row r of `incoming` with what that one sends."""
        incoming[self.rank] = outgoing[self.rank]
        self._fill([_view(row) for row in outgoing], [_view(row) for row in incoming])

    def all_reduce_(self, vector: Tensor) -> None:
        """Overwrite a vector with its sum over all workers: each adds up a share, in rank order, and sends it to all.

        Shares differ by an entry at most, and lie where they are: two hops, where a ring of M workers takes 2*(M-1).
        """
        if all_reduce_(vector, self.rank, self._links, self._timeout_s):
            return
        num_workers = len(self._links) + 1
        shares = vector.tensor_split(num_workers)
        own = shares[self.rank]
        rows = own.new_empty(num_workers, own.numel())
        self._fill([_view(share) for share in shares], [_view(row) for row in rows])
        rows[self.rank] = own
        own.copy_(rows[0])
        for row in rows[1:]:
            own.add_(row)
        self._fill([_view(own)] * num_workers, [_view(share) for share in shares])

    def all_to_all_v(self, messages: Sequence[Tensor], longest: Sequence[int]) -> list[Tensor]:
        """Send message r to worker r; returns those for this one, by rank, each of up to longest[r] bytes."""
        links = {peer: self._links[peer] for peer in self._ahead()}
        try:
            received = all_to_all(
                links, dict(enumerate(messages)), dict(enumerate(longest)), self._usual, self._timeout_s
            )
        except Exception:
            self.shut_down()
            raise
        received[self.rank] = messages[self.rank]
        self._usual = max(self._usual, *(2 * message.numel() for message in received.values()))
        return [received[rank] for rank in range(len(messages))]

    def sendrecv(self, outgoing: Tensor, incoming: Tensor, peer: int) -> None:
        """Send a message to one peer, which makes the same call, and fill `incoming` with its own."""
        flows = {peer: Flow(self._links[peer], [_view(outgoing)], [_view(incoming)])}
        move(flows, Deadline(self._timeout_s))

    def broadcast(self, message: Tensor, sender: int, longest: int) -> Tensor:
        """The message of one worker, of at most so many bytes, on all; what the others give is not sent."""
        num_workers = len(self._links) + 1
        nothing = message[:0]
        sent = [message if self.rank == sender else nothing] * num_workers
        return self.all_to_all_v(sent, [longest * (peer == sender) for peer in range(num_workers)])[sender]

    def _fill(self, outgoing: Sequence[memoryview], incoming: Sequence[memoryview]) -> None:
        """Send each other worker its part, and fill the room for what it sends; both by rank."""
        flows = {peer: Flow(self._links[peer], [outgoing[peer]], [incoming[peer]]) for peer in self._ahead()}
        move(flows, Deadline(self._timeout_s))

    def _ahead(self) -> list[int]:
        """The others, from the next rank on: each worker begins with another, so that not all use one link at once."""
        num_workers = len(self._links) + 1
        return [(self.rank + hop) % num_workers for hop in range(1, num_workers)]

    def shut_down(self) -> None:
        """End all connections: workers that wait for this one find that out."""
        for link in self._links.values():
            link.shut_down()

    def close(self) -> None:
        """Give the sockets back."""
        self.shut_down()
        for link in self._links.values():
            link.close()


def open_mesh(rank: int, names: Sequence[int], gather: Gather, timeout_s: float) -> Mesh:
    """Connections among all workers, whose ranks in the world are `names`; LaunchError on all where one cannot."""
    calls, awaits = range(rank), range(rank + 1, len(names))
    to, of = open_connections(rank, gather, calls=calls, awaits=awaits, timeout_s=timeout_s, names=names)
    return Mesh(rank, to | of, timeout_s)


def _view(message: Tensor) -> memoryview:
    return message.view(-1).view(torch.uint8).numpy().data
