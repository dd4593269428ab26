"""The wait budget of a gossip: how long a worker waits for its peers."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event

from laconic.exchange import Gossip

_SAVED_STEPS = 8  # what may be spent on waiting is saved up over so many steps at most
_RECENT = 15  # exchanges by which is known how long one takes
_QUICK = 4  # of those, the first of so many parts: a slow neighbour, one of two, is not what is usual
_USUAL = 2.0  # times what a quick one takes; with less, chance makes workers late for each other for ever
_ON_LINK = 2.0  # times that, where a step takes less: who goes on would be many steps ahead, and meet nobody again


class WaitBudget:
    """Waits for peers while there is time for it: a model that moves a step later learns less from the others.

    What an exchange may take on the link is waited for at no charge, and while that is not known, or a peer has just
    begun, all that patience allows: exchanges that nobody waits for share the link, and each then takes longer than is
    usual. Longer waits, and those in vain, are paid from a share of the time that a worker has trained for. A peer that
    was waited for in vain is not waited for the next time, so that a slow one slows nobody down for long.
    """

    def __init__(self, pattern: Gossip, clock: Callable[[], float] = time.monotonic) -> None:
        self.left_s = 0.0
        self.usual_s = 0.0  # what an exchange may take where the peer is no slower than others, once that is known
        self.overdue: set[int] = set()  # peers that were waited for in vain
        self._pattern = pattern
        self._clock = clock
        self._is_first = True  # the next exchange, for which kernels are compiled: it does not tell what is usual
        self._known: set[int] = set()  # peers that were waited for
        self._waits_for_new = True  # whether no new one was waited for in vain
        self._trained_s = 0.0  # the last step
        self._took_s: deque[float] = deque(maxlen=_RECENT)  # the last exchanges, with all that is done for one
        self._training_since = clock()

    def note_trained_(self) -> None:
        """Note that a step of training is over."""
        self._trained_s = self._clock() - self._training_since
        earned_s = self._pattern.wait_budget * self._trained_s
        self.left_s = min(self.left_s + earned_s, _SAVED_STEPS * earned_s)

    def note_training_(self) -> None:
        """Note that the next step of training begins."""
        self._training_since = self._clock()

    def note_exchanged_(self, seconds: float) -> None:
        """Note how long an exchange took."""
        if not self._is_first:
            self._learn_(seconds)
        self._is_first = False

    def _learn_(self, seconds: float) -> None:
        self._took_s.append(seconds)
        self.usual_s = _USUAL * sorted(self._took_s)[len(self._took_s) // _QUICK]

    def wait(self, peer: int, over: Sequence[Event]) -> None:
        """Wait for a peer until all of these are set, or it is enough."""
        patience = self._pattern.patience
        since = self._clock()
        is_new = self._is_new(peer)
        free_s = self._pattern.patience if is_new else self._free_s()
        self._known.add(peer)
        if self._pattern.mode == "wait":
            self._all_set(over, patience)
        elif peer in self.overdue:
            self.overdue.discard(peer)
        elif self._pattern.wait_budget and not self._all_set(over, min(free_s + max(0.0, self.left_s), patience)):
            self.overdue.add(peer)
            if is_new:
                self._waits_for_new = False
            else:
                free_s = 0.0
            if not self._took_s:  # one takes longer than that
                self._learn_(patience)
        self.left_s -= max(0.0, self._clock() - since - free_s)

    def _is_new(self, peer: int) -> bool:
        """Whether it may be compiling still."""
        is_known = 0 < self.usual_s < self._pattern.patience
        return self._waits_for_new and is_known and peer not in self._known and len(self._took_s) < _RECENT

    def _free_s(self) -> float:
        """How long a peer is waited for at no charge."""
        patience = self._pattern.patience
        if not self._took_s:
            return patience
        is_on_link = 0 < _USUAL * self._trained_s < self.usual_s
        return min(self.usual_s * (_ON_LINK if is_on_link else 1.0), patience) if self.usual_s < patience else 0.0

    def _all_set(self, events: Sequence[Event], longest_s: float) -> bool:
        """Wait for all of them, so long in all; whether they are set."""
        until = self._clock() + longest_s
        return all(event.wait(max(0.0, until - self._clock())) for event in events)
