"""How long a worker waits for its peers."""

from __future__ import annotations

import math
import threading

from laconic.exchange import Gossip
from laconic.replicas.wait_budget import WaitBudget


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


def _settled(clock: _Clock, pattern: Gossip) -> WaitBudget:
    """One that knows exchanges to take no time."""
    budget = WaitBudget(pattern, clock)
    budget.note_exchanged_(0.0)
    budget.note_exchanged_(0.0)
    return budget


def test_first_exchanges_are_waited_for_until_it_is_known_what_is_usual() -> None:
    clock = _Clock()
    budget = WaitBudget(Gossip(patience=5), clock)
    for seconds in (3.0, 1.0):  # kernels are compiled for the first
        budget.wait(1, [_Due(clock, clock.now + seconds)])
        budget.note_exchanged_(seconds)
    assert not budget.overdue and budget.left_s == 0 and budget.usual_s == 2
    impatient = WaitBudget(Gossip(patience=5), clock)
    now = clock.now
    for peer in (1, 2, 3):  # in vain once: others are not waited for either
        impatient.wait(peer, [_Due(clock, math.inf)])
    assert clock.now == now + 5


def test_who_was_not_met_yet_may_be_compiling_and_is_waited_for() -> None:
    clock = _Clock()
    budget = WaitBudget(Gossip(patience=5), clock)
    for _ in range(3):  # with one peer, a turn after the other
        budget.wait(1, [_Due(clock, clock.now + 1)])
        budget.note_exchanged_(1.0)
    budget.wait(2, [_Due(clock, clock.now + 4)])  # more than twice what is usual
    assert not budget.overdue and budget.left_s == 0
    budget.wait(2, [_Due(clock, clock.now + 4)])
    assert budget.overdue == {2} and budget.left_s < 0
    budget.left_s = 0
    now = clock.now
    budget.wait(3, [_Due(clock, math.inf)])  # in vain, at no charge: others are not waited for like that
    budget.wait(4, [_Due(clock, math.inf)])
    assert clock.now == now + 5 + 2 and budget.left_s == -2


def test_who_trains_for_less_than_an_exchange_takes_waits_for_longer() -> None:
    clock = _Clock()
    budget = WaitBudget(Gossip(patience=50), clock)
    for _ in range(20):
        budget.note_exchanged_(1.0)
    for trained_s, is_tardy in ((0.5, False), (2.0, True)):
        budget.note_training_()
        clock.now += trained_s
        budget.note_trained_()
        budget.left_s = 0
        budget.wait(1, [_Due(clock, clock.now + 3)])
        assert budget.overdue == ({1} if is_tardy else set())


def test_who_is_waited_for_in_vain_is_not_waited_for_the_next_time() -> None:
    clock = _Clock()
    never = _Due(clock, math.inf)
    budget = _settled(clock, Gossip())
    budget.left_s = 0.01
    budget.wait(1, [never])
    assert budget.overdue == {1} and budget.left_s == 0 and clock.now == 0.01
    budget.left_s = 1e9
    budget.wait(1, [never])
    assert not budget.overdue and clock.now == 0.01
    budget.wait(1, [_Due(clock, 0.0)])
    assert not budget.overdue and clock.now == 0.01


def test_what_exchanges_usually_take_is_waited_for_at_no_charge() -> None:
    clock = _Clock()
    never = _Due(clock, math.inf)
    budget = WaitBudget(Gossip(), clock)
    for seconds in (1e9, *(2.0, 100.0) * 8):  # the first does not count; a slow neighbour, one of two, is not usual
        budget.note_exchanged_(seconds)
    assert budget.usual_s == 4
    budget.wait(1, [_Due(clock, 3.0), _Due(clock, 1.0)])
    assert clock.now == 3 and not budget.overdue and budget.left_s == 0
    budget.wait(1, [never])
    assert (
        clock.now == 7 and budget.overdue == {1} and budget.left_s == -4
    )  # waited for in vain, so it is charged whole
    budget.overdue.clear()
    budget.usual_s = 1e9  # beyond the patience, so that it would be in vain
    budget.wait(1, [never])
    assert clock.now == 7 and budget.overdue == {1}


def test_what_may_be_waited_for_is_a_share_of_the_training_time() -> None:
    clock = _Clock()
    budget = _settled(clock, Gossip(wait_budget=0.5))
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
