"""While one bucket travels, the next is chosen and encoded, and the one before is applied.

A step then takes as long as its slowest station, not as all of them. Message r of bucket b leaves in the order of
(b + r, b), whatever is ready first, so all workers agree on the order, and results are those of one bucket after the
other, bit for bit: buckets share nothing that a station changes.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from laconic.layout import Bucket
from laconic.session.session import Session
from laconic.session.talk import Talk

_CLOSE_TIMEOUT_S = 5.0


@dataclass
class Flight:
    """A bucket on its way through the stations; `land` is called at its end, with what went wrong if anything did."""

    bucket: Bucket
    land: Callable[[BaseException | None], None]
    talk: Talk | None = None  # None where it could not begin
    num_said: int = 0
    is_over: bool = False
    ready: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)  # told whenever it is the talker's turn


@dataclass(frozen=True)
class _Heard:
    flight: Flight
    spoke: bool  # whether there was a message
    heard: Any = None


class Pipeline:
    """Three stations: `begin` runs where it is called, and the talker and the hearer each in a thread.

    After a first failure nothing more is said, since the workers no longer agree on the order; whatever is in flight
    lands with that error.
    """

    def __init__(self, session: Session, station: Callable[[], AbstractContextManager[object]]) -> None:
        self.error: BaseException | None = None
        self._session = session
        self._begun: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[_Heard | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_within, args=(station, work), name=f"laconic-{name}", daemon=True)
            for name, work in (("talk", self._talk), ("hear", self._hear))
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

    def _talk(self) -> None:
        """The second: in each turn everyone who has begun says its next message, then the next bucket its first."""
        speaking: list[Flight] = []
        step_is_whole = False
        while True:
            speaking = [flight for flight in speaking if self._say(flight)]
            if not step_is_whole:
                flight = self._begun.get()
                if flight is None:
                    return
                step_is_whole = flight.bucket.is_last
                if self._say(flight):
                    speaking.append(flight)
                del flight  # while it waits, the thread holds nothing
            elif not speaking:
                step_is_whole = False

    def _say(self, flight: Flight) -> bool:
        """Send its next message, if there is one; whether there may be another."""
        flight.ready.get()
        if flight.is_over:
            return False
        talk = flight.talk
        if self.error is None and talk is not None and talk.message is not None:
            try:
                heard = self._session.say(talk)
                flight.num_said += 1
                self._heard.put(_Heard(flight, True, heard))
                return flight.num_said < talk.path.most_messages
            except BaseException as error:
                self._fail(error)
        self._heard.put(_Heard(flight, spoke=False))
        return False

    def _hear(self) -> None:
        """The third: go on with what was heard, which at a speech's end is to apply it."""
        while (heard := self._heard.get()) is not None:
            flight = heard.flight
            if self.error is None:
                try:
                    flight.is_over = self._go_on(flight, heard)
                except BaseException as error:
                    self._fail(error)
            if flight.is_over or self.error is not None:
                flight.is_over = True
                flight.land(self.error)
            flight.ready.put(None)
            del flight, heard  # as above

    def _go_on(self, flight: Flight, heard: _Heard) -> bool:
        """Whether that was its end."""
        assert flight.talk is not None
        if heard.spoke:
            flight.talk.go_on(heard.heard)
        if flight.talk.message is None:
            self._session.end_(flight.talk)
        return flight.talk.message is None

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def close(self) -> None:
        """End the threads after what has begun; one that hangs in a collective is left behind."""
        self._begun.put(None)
        self._join(self._threads[0])
        self._heard.put(None)
        self._join(self._threads[1])

    def _join(self, thread: threading.Thread) -> None:
        if thread is not threading.current_thread():  # as it is where that one held the last reference
            thread.join(_CLOSE_TIMEOUT_S)


def _within(station: Callable[[], AbstractContextManager[object]], work: Callable[[], None]) -> None:
    with station():
        work()
