"""While one bucket travels, the next is selected and encoded, and the one before is applied.

A step then takes as long as its slowest stage, not as all of them. Message r of bucket b leaves in the order of
(b + offset r of its path, b), whatever is ready first. So all workers agree on the order, and results are those of one
bucket after the other, bit for bit: buckets share nothing that a stage changes.
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
from laconic.paths import Exchange
from laconic.session.session import Session

_CLOSE_TIMEOUT_S = 5.0
_CATCH_UP_S = 0.5


@dataclass
class Flight:
    """A bucket on its way through the stages; `land` is called at its end, with what went wrong if anything did."""

    bucket: Bucket
    land: Callable[[BaseException | None], None]
    exchange: Exchange | None = None  # None where it could not begin
    place: int = -1  # how many places have passed since it began
    num_sent: int = 0
    is_over: bool = False
    ready: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)  # one item whenever the sender may go on


@dataclass(frozen=True)
class _Received:
    flight: Flight
    was_sent: bool  # whether there was a message
    content: Any = None


class _Pause:
    """No bucket."""


class Pipeline:
    """Four stages: `begin` runs where it is called; a thread each sends, makes the next message, and applies.

    After a first failure nothing more is sent, since the workers no longer agree on the order; whatever is in flight
    lands with that error.
    """

    def __init__(self, session: Session, stage: Callable[[], AbstractContextManager[object]]) -> None:
        self.error: BaseException | None = None
        self._session = session
        self._begun: queue.SimpleQueue[Flight | _Pause | None] = queue.SimpleQueue()
        self._to_resume: queue.SimpleQueue[_Received | None] = queue.SimpleQueue()
        self._to_apply: queue.SimpleQueue[_Received | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_within, args=(stage, work), name=f"laconic-{name}", daemon=True)
            for name, work in (("send", self._send), ("resume", self._resume), ("apply", self._apply))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, flight: Flight) -> None:
        """The first stage: select and encode; buckets come in the order that all workers share."""
        if self.error is None:
            try:
                flight.exchange = self._session.begin(flight.bucket)
            except BaseException as error:
                self._fail(error)
        flight.ready.put(None)
        self._begun.put(flight)

    def pause(self) -> None:
        """Send all of what has begun before anything else begins; all workers pause before the same bucket."""
        self._begun.put(_Pause())

    def _send(self) -> None:
        """The second: at each place all that have begun send what is due, then the next bucket its first message."""
        sending: list[Flight] = []
        step_is_whole = False
        while True:
            sending = [flight for flight in sending if self._send_due(flight)]
            if not step_is_whole:
                flight = self._next(sending)
                if flight is None:
                    if sending:
                        self._fail(LaconicError("this session was closed in the midst of a step; nothing more is sent"))
                    self._send_all(sending)
                    return
                if isinstance(flight, _Pause):
                    self._send_all(sending)
                    sending = []
                    continue
                step_is_whole = flight.bucket.is_last
                if self._send_due(flight):
                    sending.append(flight)
                del flight  # while it waits, the thread holds nothing
            elif not sending:
                step_is_whole = False

    def _next(self, sending: list[Flight]) -> Flight | _Pause | None:
        """The next bucket that has begun; where that takes long, answers to what was sent are received meanwhile."""
        while True:
            try:
                return self._begun.get(timeout=_CATCH_UP_S if sending and self.error is None else None)
            except queue.Empty:
                try:
                    self._session.transport.receive_pending()
                except BaseException as error:
                    self._fail(error)

    def _send_all(self, sending: list[Flight]) -> None:
        """Until all that have begun have sent everything, without another one."""
        while sending:
            sending = [flight for flight in sending if self._send_due(flight)]

    def _send_due(self, flight: Flight) -> bool:
        """Send its next message, if there is one that is due at this place; whether there may be another."""
        flight.place += 1
        exchange = flight.exchange
        offsets = exchange.path.message_offsets if exchange is not None else (0,)
        if flight.place < offsets[flight.num_sent]:
            return True
        flight.ready.get()
        if flight.is_over:
            return False
        if self.error is None and exchange is not None and exchange.message is not None:
            try:
                content = self._session.send(exchange)
                flight.num_sent += 1
                is_last = flight.num_sent == len(offsets)
                (self._to_apply if is_last else self._to_resume).put(_Received(flight, True, content))
                return not is_last
            except BaseException as error:
                self._fail(error)
        self._to_apply.put(_Received(flight, was_sent=False))
        return False

    def _resume(self) -> None:
        """The third: make the next message; where there is none, what was received is applied."""
        while (received := self._to_resume.get()) is not None:
            flight = received.flight
            if not self._resume_exchange(received):
                self._session.transport.shut_down()  # others may wait for what this worker would have sent next
            flight.is_over = self.error is not None or flight.exchange is None or flight.exchange.message is None
            if flight.is_over:
                self._to_apply.put(_Received(flight, was_sent=False))
            flight.ready.put(None)
            del flight, received  # as above

    def _apply(self) -> None:
        """The last."""
        while (received := self._to_apply.get()) is not None:
            flight = received.flight
            self._resume_exchange(received)
            if self.error is None:
                try:
                    assert flight.exchange is not None
                    self._session.end_(flight.exchange)
                except BaseException as error:
                    self._fail(error)
            flight.land(self.error)
            del flight, received  # as above

    def _resume_exchange(self, received: _Received) -> bool:
        """Return whether that went well, or there was nothing to do."""
        if self.error is None and received.was_sent:
            try:
                assert received.flight.exchange is not None
                received.flight.exchange.resume(received.content)
            except BaseException as error:
                self._fail(error)
                return False
        return True

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def close(self) -> None:
        """End the threads after what has begun; one that hangs in a collective is left behind."""
        ends = [partial(entrance.put, None) for entrance in (self._begun, self._to_resume, self._to_apply)]
        for end, thread in zip(ends, self._threads, strict=True):
            end()
            if thread is not threading.current_thread():  # as it is where that one held the last reference
                thread.join(_CLOSE_TIMEOUT_S)


def _within(stage: Callable[[], AbstractContextManager[object]], work: Callable[[], None]) -> None:
    with stage():
        work()
