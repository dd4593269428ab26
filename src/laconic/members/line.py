"""One connection between a member and its server: a thread that reads it, and one that writes what waits in a queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from laconic.errors import FrameError
from laconic.members.messages import Word, read, write
from laconic.transport import Connection, Kind

_GOODBYE_S = 5.0
_SILENCE_S = 30.0  # after which the kernel takes a host for dead that answers no probe


class Line:
    """A connection whose ends send when they like.

    Args:
        connection: One whose handshake is over.
        on_word: Called with each message, in a thread of the line's own.
        on_end: Called once with the reason, when the connection has ended.
        longest: Bytes that a message may have at most; set `longest` and `most_unsent` anew once more is known.
    """

    def __init__(
        self, connection: Connection, on_word: Callable[[Word], None], on_end: Callable[[str], None], longest: int
    ) -> None:
        self.bytes_out = self.bytes_in = 0
        self._connection = connection
        self._on_word = on_word
        self._on_end = on_end
        self.longest = longest
        self.most_unsent = 4 * longest  # bytes that may wait for an end that takes little
        self._waiting: queue.SimpleQueue[Word | None] = queue.SimpleQueue()
        self._unsent = 0
        self._counting = threading.Lock()
        connection.give_up_after(_SILENCE_S)
        self._threads = [
            threading.Thread(target=work, name=f"laconic-{work.__name__.strip('_')}", daemon=True)
            for work in (self._read, self._write)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, word: Word) -> None:
        """Let a message leave after those before it; the line ends where its other end takes too little."""
        with self._counting:
            self._unsent += _size(word)
        if self._unsent > self.most_unsent:
            self._connection.shut_down()
        self._waiting.put(word)

    def _read(self) -> None:
        why = "it has closed the connection"
        try:
            while True:
                message = self._connection.receive({Kind.MEMBER: self.longest})
                self.bytes_in += message.num_bytes
                self._on_word(read(message))
        except OSError as error:
            why = str(error.strerror or error)
        except FrameError as error:
            why = f"it {error}"
        self._connection.shut_down()
        self._waiting.put(None)
        self._on_end(why)

    def _write(self) -> None:
        with suppress(OSError):  # the thread that reads finds that out
            while (word := self._waiting.get()) is not None:
                self.bytes_out += self._connection.send(write(word))
                with self._counting:
                    self._unsent -= _size(word)
        self._connection.shut_down()

    def finish(self) -> None:
        """End it once all that waits has left."""
        self._waiting.put(None)

    def close(self) -> None:
        """End it now; its threads find that out."""
        self._connection.shut_down()
        self._waiting.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(_GOODBYE_S)
        self._connection.close()


def _size(word: Word) -> int:
    payload = getattr(word, "payload", None)
    return 0 if payload is None else int(payload.numel())
