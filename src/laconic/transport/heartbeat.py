"""Tells a peer that hangs from one that is slow: a process that lives sends a heartbeat, whatever it computes."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LOG = logging.getLogger("laconic.transport")
_SHORTEST_TICK_S = 0.05


@dataclass(eq=False)
class _Wait:
    peer: int
    silent_s: float = 0.0  # since it began, or since the peer's last message
    is_logged: bool = False


class HeartbeatMonitor:
    """A thread that sends this process's heartbeats, and drops peers that are waited for and send nothing.

    A warning after `warn_s`, dropped after `timeout_s`. Only time that this process has lived through counts: where a
    whole job is stopped and continued, nobody is dropped. A process that stood still alone was: see `stood_still_s`.
    """

    def __init__(
        self, rank: int, warn_s: float, timeout_s: float, beat: Callable[[], None], drop: Callable[[int, str], None]
    ) -> None:
        self.stood_still_s = 0.0  # the longest that this process did
        self._rank = rank
        self._warn_s = warn_s
        self._timeout_s = timeout_s
        self._tick_s = max(_SHORTEST_TICK_S, min(warn_s, timeout_s) / 2)
        self._beat = beat
        self._drop = drop
        self._waits: list[_Wait] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="laconic-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def waiting_for(self, peer: int) -> Iterator[None]:
        """Drop this peer if it sends nothing meanwhile."""
        wait = _Wait(peer)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def note_alive(self, peer: int) -> None:
        """Note that a message of this peer came."""
        for wait in list(self._waits):
            if wait.peer == peer:
                wait.silent_s = 0.0
                wait.is_logged = False

    @property
    def was_dropped(self) -> bool:
        """Whether peers that closed their connections may have done so because this process stood still."""
        return self.stood_still_s > self._timeout_s / 2

    def _watch(self) -> None:
        while not self._over.is_set():
            since = time.monotonic()
            self._over.wait(self._tick_s)
            self.stood_still_s = max(self.stood_still_s, time.monotonic() - since - self._tick_s)
            self._beat()
            for wait in list(self._waits):
                self._judge(wait)

    def _judge(self, wait: _Wait) -> None:
        wait.silent_s += self._tick_s
        if wait.silent_s >= self._timeout_s:
            self._drop(wait.peer, f"has sent nothing for {self._timeout_s:g} s")
        elif wait.silent_s >= self._warn_s and not wait.is_logged:
            wait.is_logged = True
            silent = f"rank {wait.peer} has sent nothing for {self._warn_s:g} s"
            say(self._rank, f"{silent}; it is waited for, and dropped after {self._timeout_s:g}")


def say(rank: int, message: str) -> None:
    """Log a warning of one rank's."""
    _LOG.warning("rank %d: %s", rank, message)
