"""Bytes, counted where they are handed to the network."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

BESIDE = frozenset({"total", "state", "load", "stats", "close", "error"})  # kinds beside the exchange of gradients


@dataclass
class Count:
    """The messages of one kind that a worker sent and received."""

    messages: int = 0
    payload_bytes: int = 0  # what it contributed, once
    bytes_out: int = 0  # what left it, copies and forwarding included
    bytes_in: int = 0


@dataclass
class Traffic:
    """Counts by kind of message; sums over kinds are of training alone."""

    by_kind: dict[str, Count] = field(default_factory=dict)

    def count(self, kind: str, payload_bytes: int, bytes_out: int, bytes_in: int) -> None:
        entry = self.by_kind.setdefault(kind, Count())
        entry.messages += 1
        entry.payload_bytes += payload_bytes
        entry.bytes_out += bytes_out
        entry.bytes_in += bytes_in

    def count_all_reduce(self, kind: str, payload_bytes: int, num_workers: int) -> None:
        moved = ring_bytes(payload_bytes, num_workers)
        self.count(kind, payload_bytes, moved, moved)

    def count_all_gather(self, kind: str, payload_bytes: int, num_workers: int) -> None:
        moved = payload_bytes * (num_workers - 1)
        self.count(kind, payload_bytes, moved, moved)

    def count_all_to_all(self, kind: str, payload_bytes: int, num_workers: int) -> None:
        moved = payload_bytes // num_workers * (num_workers - 1)
        self.count(kind, payload_bytes, moved, moved)

    def count_push(self, rank: int, sent: Sequence[int], received: Sequence[int]) -> None:
        """Parts that went up, in bytes by rank, where each of M workers is an owner, and lengths, of answers too."""
        others = len(sent) - 1
        self.count("lengths", 8, 16 * others, 16 * others)
        self.count("up", sum(sent), sum(sent) - sent[rank], sum(received) - received[rank])

    def count_pull(self, rank: int, answers: Sequence[int]) -> None:
        """Answers that came down."""
        self.count("down", answers[rank], (len(answers) - 1) * answers[rank], sum(answers) - answers[rank])

    def count_broadcast(self, num_bytes: int, num_workers: int, *, sends: bool) -> None:
        """A frame that goes from one worker to all others."""
        out = num_bytes * (num_workers - 1)
        self.count("broadcast", num_bytes if sends else 0, out if sends else 0, 0 if sends else num_bytes)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Messages that are sent inside serve measuring, and are not counted."""
        before = self.copy()
        yield
        self.by_kind = before

    def copy(self) -> dict[str, Count]:
        """The counts as they are now."""
        return {kind: replace(count) for kind, count in list(self.by_kind.items())}

    @property
    def bytes_out(self) -> int:
        return sum(count.bytes_out for kind, count in self.by_kind.items() if kind not in BESIDE)

    @property
    def bytes_in(self) -> int:
        return sum(count.bytes_in for kind, count in self.by_kind.items() if kind not in BESIDE)


def ring_bytes(payload_bytes: int, num_workers: int) -> int:
    """What leaves each of M workers in an all-reduce: 2*(M-1)/M of the payload (Gloo, the mesh, and NCCL at size).

    It is the mean over workers: one whose share of the sum is longer by an entry sends M-2 more than the others.
    """
    return -(-2 * (num_workers - 1) * payload_bytes // num_workers)
