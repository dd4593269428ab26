"""While one bucket travels, the next is chosen and encoded, and the one before is applied.

A step then takes as long as its slowest station, not as all of them. Message r of bucket b leaves in the order of
(b + r, b), where a path may let turns pass before a message, whatever is ready first. So all workers agree on the
order, and results are those of one bucket after the other, bit for bit: buckets share nothing that a station changes.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from laconic.errors import LaconicError
from laconic.layout import Bucket
from laconic.session.session import Session
from laconic.session.talk import Talk

_CLOSE_TIMEOUT_S = 5.0
_CATCH_UP_S = 0.5


@dataclass
class Flight:
    """A bucket on its way through the stations; `land` is called at its end, with what went wrong if anything did."""

    bucket: Bucket
    land: Callable[[BaseException | None], None]
    talk: Talk | None = None  # None where it could not begin
    num_turns: int = -1  # since it has begun
    num_said: int = 0
    is_over: bool = False
    ready: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)  # told whenever it is the talker's turn


@dataclass(frozen=True)
class _Heard:
    flight: Flight
    spoke: bool  # whether there was a message
    heard: Any = None


class _Pause:
    """No bucket."""


class Pipeline:
    """Four stations: `begin` runs where it is called; a thread each talks, finds what to say next, and applies.

    After a first failure nothing more is said, since the workers no longer agree on the order; whatever is in flight
    lands with that error.
    """

    def __init__(self, session: Session, station: Callable[[], AbstractContextManager[object]]) -> None:
        self.error: BaseException | None = None
        self._session = session
        self._begun: queue.SimpleQueue[Flight | _Pause | None] = queue.SimpleQueue()
        self._to_answer: queue.SimpleQueue[_Heard | None] = queue.SimpleQueue()
        self._to_apply: queue.SimpleQueue[_Heard | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_within, args=(station, work), name=f"laconic-{name}", daemon=True)
            for name, work in (("talk", self._talk), ("answer", self._answer), ("apply", self._apply))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, flight: Flight) -> None:
        """The first station: choose and encode; buckets come in the order that all workers share."""
        if self.error is None:
            try:
                flight.talk = self._session.begin(flight.bucket)
            except BaseException as error:
                self._fail(error)
        flight.ready.put(None)
        self._begun.put(flight)

    def pause(self) -> None:
        """Say all that has begun before anything else begins; all workers pause before the same bucket."""
        self._begun.put(_Pause())

    def _talk(self) -> None:
        """The second: in each turn everyone who has begun says what is due, then the next bucket its first message."""
        speaking: list[Flight] = []
        step_is_whole = False
        while True:
            speaking = [flight for flight in speaking if self._take_turn(flight)]
            if not step_is_whole:
                flight = self._next(speaking)
                if flight is None:
                    if speaking:
                        self._fail(LaconicError("this session was closed in the midst of a step; nothing more is said"))
                    self._let_turns_pass(speaking)
                    return
                if isinstance(flight, _Pause):
                    self._let_turns_pass(speaking)
                    speaking = []
                    continue
                step_is_whole = flight.bucket.is_last
                if self._take_turn(flight):
                    speaking.append(flight)
                del flight  # while it waits, the thread holds nothing
            elif not speaking:
                step_is_whole = False

    def _next(self, speaking: list[Flight]) -> Flight | _Pause | None:
        """What has begun; where that takes long, what is said to those who speak already is taken meanwhile."""
        while True:
            try:
                return self._begun.get(timeout=_CATCH_UP_S if speaking and self.error is None else None)
            except queue.Empty:
                try:
                    self._session.transport.receive_pending()
                except BaseException as error:
                    self._fail(error)

    def _let_turns_pass(self, speaking: list[Flight]) -> None:
        """Until all that have begun have said everything, without another one."""
        while speaking:
            speaking = [flight for flight in speaking if self._take_turn(flight)]

    def _take_turn(self, flight: Flight) -> bool:
        """Send its next message, if there is one and this is its turn; whether there may be another."""
        flight.num_turns += 1
        turns = flight.talk.path.turns if flight.talk is not None else (0,)
        if flight.num_turns < turns[flight.num_said]:
            return True
        flight.ready.get()
        if flight.is_over:
            return False
        if self.error is None and flight.talk is not None and flight.talk.message is not None:
            try:
                heard = self._session.say(flight.talk)
                flight.num_said += 1
                is_last = flight.num_said == len(turns)
                (self._to_apply if is_last else self._to_answer).put(_Heard(flight, True, heard))
                return not is_last
            except BaseException as error:
                self._fail(error)
        self._to_apply.put(_Heard(flight, spoke=False))
        return False

    def _answer(self) -> None:
        """The third: find the next message; where there is none, what was heard is applied."""
        while (heard := self._to_answer.get()) is not None:
            flight = heard.flight
            if not self._go_on(flight, heard):
                self._session.transport.hang_up()  # others may wait for what this worker would have said next
            flight.is_over = self.error is not None or flight.talk is None or flight.talk.message is None
            if flight.is_over:
                self._to_apply.put(_Heard(flight, spoke=False))
            flight.ready.put(None)
            del flight, heard  # as above

    def _apply(self) -> None:
        """The last."""
        while (heard := self._to_apply.get()) is not None:
            flight = heard.flight
            self._go_on(flight, heard)
            if self.error is None:
                try:
                    assert flight.talk is not None
                    self._session.end_(flight.talk)
                except BaseException as error:
                    self._fail(error)
            flight.land(self.error)
            del flight, heard  # as above

    def _go_on(self, flight: Flight, heard: _Heard) -> bool:
        """Whether that went well, or there was nothing to do."""
        if self.error is None and heard.spoke:
            try:
                assert flight.talk is not None
                flight.talk.go_on(heard.heard)
            except BaseException as error:
                self._fail(error)
                return False
        return True

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def close(self) -> None:
        """End the threads after what has begun; one that hangs in a collective is left behind."""
        ends = [partial(entrance.put, None) for entrance in (self._begun, self._to_answer, self._to_apply)]
        for end, thread in zip(ends, self._threads, strict=True):
            end()
            self._join(thread)

    def _join(self, thread: threading.Thread) -> None:
        if thread is not threading.current_thread():  # as it is where that one held the last reference
            thread.join(_CLOSE_TIMEOUT_S)


def _within(station: Callable[[], AbstractContextManager[object]], work: Callable[[], None]) -> None:
    with station():
        work()
