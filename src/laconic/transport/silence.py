"""Tells a peer that hangs from one that is slow: who lives says so now and then, whatever it computes."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_SHORTEST_TICK_S = 0.05


@dataclass(eq=False)
class _Wait:
    peer: int
    silent_s: float = 0.0  # since it began, or since the peer last said anything
    is_said: bool = False


class SilenceWatch:
    """A thread that lets peers know that this process lives, and gives up those that are waited for and say nothing.

    One line after `patience_s`, given up after `timeout_s`. Only time that this process has lived through counts: where
    a whole job is stopped and goes on, nobody is given up. Who stood still alone has been: `stood_still_s` tells.
    """

    def __init__(
        self,
        rank: int,
        patience_s: float,
        timeout_s: float,
        say_alive: Callable[[], None],
        give_up: Callable[[int, str], None],
    ) -> None:
        self.stood_still_s = 0.0  # the longest that this process did
        self._rank = rank
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._tick_s = max(_SHORTEST_TICK_S, min(patience_s, timeout_s) / 2)
        self._say_alive = say_alive
        self._give_up = give_up
        self._waits: list[_Wait] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="laconic-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def waiting_for(self, peer: int) -> Iterator[None]:
        """Give this peer up if it says nothing meanwhile."""
        wait = _Wait(peer)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def note_heard(self, peer: int) -> None:
        """It lives."""
        for wait in list(self._waits):
            if wait.peer == peer:
                wait.silent_s = 0.0
                wait.is_said = False

    @property
    def was_given_up(self) -> bool:
        """Whether peers that hung up may have done so because this process stood still."""
        return self.stood_still_s > self._timeout_s / 2

    def _watch(self) -> None:
        while not self._over.is_set():
            since = time.monotonic()
            self._over.wait(self._tick_s)
            self.stood_still_s = max(self.stood_still_s, time.monotonic() - since - self._tick_s)
            self._say_alive()
            for wait in list(self._waits):
                self._judge(wait)

    def _judge(self, wait: _Wait) -> None:
        wait.silent_s += self._tick_s
        if wait.silent_s >= self._timeout_s:
            self._give_up(wait.peer, f"has said nothing for {self._timeout_s:g} s")
        elif wait.silent_s >= self._patience_s and not wait.is_said:
            wait.is_said = True
            waited = f"rank {wait.peer} has said nothing for {self._patience_s:g} s"
            say(self._rank, f"{waited}; it is waited for, and dropped after {self._timeout_s:g}")


def say(rank: int, message: str) -> None:
    """One line on stderr, in one piece: other workers write there too."""
    sys.stderr.write(f"laconic: rank {rank}: {message}\n")
    sys.stderr.flush()
