"""Gossip by appointment: who meets whom at which turn is known to all, and nobody waits for long."""

import math
import threading

from torch import Tensor

from laconic.exchange import asks_of, matching
from laconic.replicas.gossip.free import Free


class Paired(Free):
    """One worker's side; turns are counted by a clock that all workers share, their steps.

    Each of a pair asks the other about one half of the model, both at once, so that the link is busy both ways and
    neither computes while the other waits. Of a small model, and where entries are chosen, one of the two asks about
    everything.

    Who is to be asked waits a moment until its answer has left, so both of a pair move to the middle before they train
    on, and no answer shares a link with the questions of the next turn, which makes one pair late for all others. In
    `free` who is asked moves a step later. Who comes late finds what it owes, and who is early is not held up for long.
    """

    def __post_init__(self) -> None:
        self._heard: dict[int, float] = {}  # peer -> the last turn at which it was answered
        self._expected: dict[int, tuple[int, threading.Event]] = {}  # peer -> (turn, set when it was answered)
        super().__post_init__()

    def _talk(self, step: int, lr: float) -> None:
        """Keep the appointments of this step, one after the other."""
        pattern = self.pattern
        self._count_asking()  # for the stats: a late answer keeps a worker from no other appointment
        for turn in self.tracker.turns(step, lr):
            partner = matching(pattern.peers, pattern.seed, turn, self.end.num_workers)[self.end.rank]
            if partner in self._reachable and partner not in self._asking:
                self._meet(partner, turn)

    def _meet(self, partner: int, turn: int) -> None:
        """Ask about one part of the model and be asked about the other; where there is but one, one of the two asks."""
        everything = list(range(len(self.vector.groups)))
        first = 0 if asks_of(self.pattern.seed, turn, self.end.rank, partner) else 1
        mine = everything[first::2]
        theirs = everything[1 - first :: 2]
        self._catch_up()  # what either is told is this step's model
        asked = [self._expect(partner, turn)] if theirs else []
        answered = [self._begin(partner, turn, mine)] if mine else []
        self._wait(partner, *answered, *asked)

    def _expect(self, peer: int, turn: int) -> threading.Event:
        """Set when the peer has been answered at that turn or a later one, or never will."""
        with self._lock:
            asked = threading.Event()
            if self._heard.get(peer, -1) >= turn:
                asked.set()
            self._expected[peer] = (turn, asked)
        return asked

    def _served(self, peer: int, turn: float) -> None:
        """Note that it asked at this turn; who has died is as one who has asked at all of them."""
        with self._lock:
            self._heard[peer] = max(turn, self._heard.get(peer, -1))
            expected, asked = self._expected.get(peer, (math.inf, None))
        if asked is not None and turn >= expected:
            asked.set()

    def _drop(self, peer: int, why: str) -> None:
        super()._drop(peer, why)
        self._served(peer, math.inf)

    def owe(self, owed: Tensor | None) -> None:
        super().owe(owed)
        with self._lock:
            self._heard = {}
            self._expected = {}
