"""Gossip by appointment: who meets whom at which turn is known to all, and nobody waits for long."""

import threading

from torch import Tensor

from laconic.exchange import asks_of, matching
from laconic.gossip.free import Free
from laconic.gossip.replica import Replica
from laconic.transport import Mailbox


class Paired(Free):
    """One worker's side; turns are counted by a clock that all workers share, their steps.

    Each of a pair asks the other about one half of the model, both at once, so that the link is busy both ways and
    neither computes while the other waits. Of a small model, and where entries are chosen, one of the two asks about
    everything.

    Who is to be asked waits a moment for that, so both of a pair move to the middle before they train on; in `free` who
    is asked moves a step later. Who comes late finds what it owes, and who is early is not held up for long.
    """

    def __init__(self, mailbox: Mailbox, replica: Replica) -> None:
        self._heard: dict[int, int] = {}  # peer -> the last turn at which it asked
        self._expected: dict[int, tuple[int, threading.Event]] = {}  # peer -> (turn, set when it has asked)
        super().__init__(mailbox, replica)

    def _talk(self, step: int, lr: float) -> None:
        """Keep the appointments of this step, one after the other."""
        pattern = self._pattern
        self._count_asking()  # for the stats: a late answer keeps a worker from no other appointment
        for turn in self._tracker.turns(step, lr):
            partner = matching(pattern.peers, pattern.seed, turn, self._mailbox.num_workers)[self._mailbox.rank]
            if partner in self._reachable and partner not in self._asking:
                self._meet(partner, turn)

    def _meet(self, partner: int, turn: int) -> None:
        """Ask about one part of the model and be asked about the other; where there is but one, one of the two asks."""
        everything = list(range(len(self._replica.vector.groups)))
        first = 0 if asks_of(self._pattern.seed, turn, self._mailbox.rank, partner) else 1
        mine = everything[first::2]
        theirs = everything[1 - first :: 2]
        self._catch_up()  # what either is told is this step's model
        asked = [self._expect(partner, turn)] if theirs else []
        answered = [self._begin(partner, turn, mine)] if mine else []
        self._wait(partner, *answered, *asked)

    def _expect(self, peer: int, turn: int) -> threading.Event:
        """Set when the peer has asked at that turn or a later one, or never will."""
        with self._lock:
            asked = threading.Event()
            if self._heard.get(peer, -1) >= turn:
                asked.set()
            self._expected[peer] = (turn, asked)
        return asked

    def _drop(self, peer: int, why: str) -> None:
        super()._drop(peer, why)
        with self._lock:
            _, asked = self._expected.get(peer, (0, None))
        if asked is not None:
            asked.set()

    def owe(self, owed: Tensor | None) -> None:
        super().owe(owed)
        with self._lock:
            self._heard = {}
            self._expected = {}

    def _answer(self, peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
        answer = super()._answer(peer, turn, message, num_bytes)
        with self._lock:
            self._heard[peer] = max(turn, self._heard.get(peer, -1))
            expected, asked = self._expected.get(peer, (turn + 1, None))
        if asked is not None and turn >= expected:
            asked.set()
        return answer
