"""How long a worker waits for its peers."""

from __future__ import annotations

import math
import threading

from laconic.exchange import Gossip
from laconic.gossip.wait_budget import WaitBudget


class _Clock:
    """Seconds that pass only where something is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Due(threading.Event):
    """Set at a given time."""

    def __init__(self, clock: _Clock, at: float) -> None:
        super().__init__()
        self._clock = clock
        self._at = at

    def wait(self, timeout: float | None = None) -> bool:
        left = max(0.0, self._at - self._clock.now)
        self._clock.now += left if timeout is None else min(left, timeout)
        return self._clock.now >= self._at


def test_who_is_waited_for_in_vain_is_not_waited_for_the_next_time() -> None:
    clock = _Clock()
    never = _Due(clock, math.inf)
    budget = WaitBudget(Gossip(), clock)
    budget.left_s = 0.01
    budget.wait(1, [never])
    assert budget.tardy == {1} and budget.left_s == 0 and clock.now == 0.01
    budget.left_s = 1e9
    budget.wait(1, [never])
    assert not budget.tardy and clock.now == 0.01
    budget.wait(1, [_Due(clock, 0.0)])
    assert not budget.tardy and clock.now == 0.01


def test_what_exchanges_usually_take_is_waited_for_at_no_charge() -> None:
    clock = _Clock()
    never = _Due(clock, math.inf)
    budget = WaitBudget(Gossip(), clock)
    for seconds in (2.0, 100.0) * 8:  # a slow neighbour, one of two, is not what is usual
        budget.note_exchanged_(seconds)
    assert budget.usual_s == 4
    budget.wait(1, [_Due(clock, 3.0), _Due(clock, 1.0)])
    assert clock.now == 3 and not budget.tardy and budget.left_s == 0
    budget.wait(1, [never])
    assert clock.now == 7 and budget.tardy == {1} and budget.left_s == -4  # waited for in vain, so it is charged whole
    budget.tardy.clear()
    budget.usual_s = 1e9  # beyond the patience, so that it would be in vain
    budget.wait(1, [never])
    assert clock.now == 7 and budget.tardy == {1}


def test_what_may_be_waited_for_is_a_share_of_the_training_time() -> None:
    clock = _Clock()
    budget = WaitBudget(Gossip(grace=0.5), clock)
    for _ in range(20):
        clock.now += 1
        budget.note_trained_()
        budget.note_training_()
    assert budget.left_s == 4  # of eight steps at most
    budget.wait(1, [_Due(clock, math.inf)])
    assert clock.now == 24 and budget.left_s == 0
    waiting = WaitBudget(Gossip(mode="wait", patience=3), clock)
    waiting.wait(1, [_Due(clock, math.inf)])
    assert clock.now == 27
