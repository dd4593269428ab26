"""A member's part in the run of one server: the connection, which is made again where it ends, and a replica."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from contextlib import suppress
from zlib import crc32

import torch
from torch import nn

from laconic.errors import LaunchError, PeerError
from laconic.members.combine import Combine
from laconic.members.host import address_of
from laconic.members.masks import Masks, check_masks
from laconic.members.messages import PROTOCOL, Codes, Join, Line, Offer, Refusal, Roster, Status, Update, Word
from laconic.members.replica import Replica, check_elastic
from laconic.members.syncer import fingerprint_of, stated_layouts
from laconic.recipes import parse
from laconic.transport import Address, Connection, connect, longest_message

_LOG = logging.getLogger("laconic.members")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0  # between two attempts to reach a server that is gone
_LONGER = 1.25  # than the pause before: who comes back does so within a quarter of the time that the server was gone
_CONNECT_S = 10.0
_REMIND_S = 30.0  # between two lines about a server that is waited for


class Membership:
    """One server that a member has joined, and the fragments that it keeps; it offers its scheme at once.

    Args:
        address: The server's "host:port".
        model: The bare model.
        id: The member's.
        generation: Drawn by each process.
        timeout_s: How long the server may take to answer.
        share: (i, n): this is server i of n, and keeps every n-th fragment from i on.
        is_masked: Whether the server must not see single drifts.
    """

    _line: Line

    def __init__(
        self,
        address: str,
        model: nn.Module,
        id: str,
        generation: int,
        timeout_s: float,
        share: tuple[int, int],
        *,
        is_masked: bool = False,
    ) -> None:
        self.error: PeerError | None = None
        self.waited_s = 0.0
        self.num_connections = 0
        self._address = address
        self._id = id
        self._timeout_s = timeout_s
        self._longest = max(1 << 20, longest_message(list(model.parameters())))
        self._inbox: queue.SimpleQueue[Word] = queue.SimpleQueue()
        self._roster_lines: dict[str, Line] = {}  # under masks: by which a roster came, by its digest
        self._early: list[Word] = []  # in lockstep: results that came before they are due
        self._closed = threading.Event()
        self._pause_s = _FIRST_PAUSE_S  # before the server is dialled anew
        self._has_status = False  # whether the server has said by this line where the run stands
        self._ended_bytes_out = self._ended_bytes_in = 0  # of connections before this one
        self._join: Join | None = None
        self._dial()
        try:
            offer = self._next(timeout_s, "its offer")
            if not isinstance(offer, Offer) or offer.protocol != PROTOCOL:
                raise LaunchError(
                    f"the server at {address} runs another release of laconic; install the same everywhere"
                )
            if is_masked and not offer.mask_bits:
                raise PeerError(f"the server at {address} would see this member's drifts; serve it with --mask-bits 16")
            scheme = check_elastic(parse(offer.scheme))
            if offer.mask_bits:
                check_masks(scheme, offer.mask_bits, Combine())
            masks = Masks(offer.mask_bits, secrets.token_bytes(32)) if offer.mask_bits else None
            self.replica = Replica(model, scheme, generation, crc32(id.encode()), share, masks)
        except BaseException:
            self.close()
            raise

    def begin(self, inner_momentum: float) -> bool:
        """Join, or come back; whether this member's model is to found the run."""
        layouts = self.replica.layouts
        generation = self.replica.generation
        key = self.replica.masks.public if self.replica.masks else ""
        stated = stated_layouts(layouts)
        self._join = Join(self._id, generation, fingerprint_of(layouts), inner_momentum, stated, key)
        self._line.send(self._join)
        while not isinstance(word := self._next(self._timeout_s, "where the run stands"), Status):
            self._handle(word)
        self._inbox.put(word)
        return word.founder == generation and not word.is_founded

    def await_anchors(self) -> None:
        """Wait until the replica has the anchors, and knows what became of its drifts."""
        pieces = self.replica.pieces.values()
        while not self.replica.is_ready or any(piece.is_asking for piece in pieces):
            self._handle(self._next(self._timeout_s, "its anchors"))

    def send(self, words: list[Word]) -> None:
        for word in words:
            self._line.send(word)

    def leave(self, timeout_s: float) -> None:
        """Hand over what is owed to this server; PeerError where it could not be reached in time."""
        try:
            early, self._early = self._early, []
            for word in early:  # in lockstep: what became of drifts is not due yet, and is asked for now
                self._handle(word)
            self.send(self.replica.leave())
            while not self.replica.has_left:
                self._handle(self._next(timeout_s, "its answer that it has what was handed over"))
        except LaunchError as error:
            lost = self.replica.uncounted_norm
            raise PeerError(f"{error}; up to a drift of norm {lost:.3g} is lost with this member") from None

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        self._line.close()

    @property
    def bytes_out(self) -> int:
        return self._ended_bytes_out + self._line.bytes_out

    @property
    def bytes_in(self) -> int:
        return self._ended_bytes_in + self._line.bytes_in

    # The connection

    def _dial(self) -> None:
        connection = connected(self._address, min(_CONNECT_S, self._timeout_s))
        self.num_connections += 1
        if self.num_connections > 1:
            self._ended_bytes_out += self._line.bytes_out
            self._ended_bytes_in += self._line.bytes_in
        line = Line(connection, self._on_word, self._on_end, self._longest)
        self._has_joined = self._join is not None
        if self._join is not None:  # before anything that training sends by this line
            line.send(self._join)
        self._line = line
        line.start()  # its first word may come before this returns

    def _on_word(self, word: Word) -> None:
        """In the line's thread: all but the offer of a server that was joined at once waits for the training thread."""
        if isinstance(word, Offer) and self._has_joined:
            return
        if isinstance(word, Status):
            self._has_status, self._pause_s = True, _FIRST_PAUSE_S
        if isinstance(word, Roster):
            self._roster_lines[word.digest().hex()] = self._line
        self._inbox.put(word)

    def _on_end(self, why: str) -> None:
        self._roster_lines.clear()
        if not self._closed.is_set():
            if self._has_status:  # otherwise it was refused, and is told so by the thread that asked
                _LOG.warning("the connection to %s has ended (%s); training goes on meanwhile", self._address, why)
            threading.Thread(target=self._dial_again, name="laconic-member-dial", daemon=True).start()

    def _dial_again(self) -> None:
        """Try until the server is back and says where the run stands, less often with time."""
        begun = reminded = time.monotonic()
        self._line.close()
        while not self._closed.is_set() and self.error is None:
            if not self._has_status:
                if self._closed.wait(self._pause_s * (0.5 + torch.rand(()).item())):
                    return
                self._pause_s = min(_LONGER * self._pause_s, _LONGEST_PAUSE_S)
            self._has_status = False
            with suppress(LaunchError):
                self._dial()
                if self._closed.is_set():
                    self._line.close()
                return
            if time.monotonic() > reminded + _REMIND_S:
                reminded = time.monotonic()
                _LOG.warning("%s has been gone for %.0f s; it is tried again", self._address, reminded - begun)

    def _next(self, timeout_s: float, what: str) -> Word:
        try:
            word = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise LaunchError(f"the server at {self._address} has not sent {what} for {timeout_s:g} s") from None
        if isinstance(word, Refusal):
            self._refuse(word)
        return word

    def _refuse(self, refusal: Refusal) -> None:
        self.error = PeerError(f"the server at {self._address} has refused this member: {refusal.why}")
        self.close()
        raise self.error

    # What has come

    def _handle(self, word: Word) -> None:
        if isinstance(word, Refusal):
            self._refuse(word)
        if isinstance(word, Offer) and self._join is not None:  # of a connection that ended before the answer left
            self._line.send(self._join)
        if isinstance(word, Status) and word.lost_norm:
            _LOG.warning(
                "a residual of norm %.3g is lost with the process that was %r before; join with its state to keep it",
                word.lost_norm,
                self._id,
            )
        for reply in self.replica.on_word(word):
            # Its sum is void: by another line the server would have this drift as the difference of two sums.
            line = self._roster_lines.pop(reply.roster, None) if isinstance(reply, Codes) else self._line
            if line is not None:
                line.send(reply)

    def handle_all(self) -> None:
        """Everything that has come; in lockstep, results that are not due stay."""
        words, self._early = self._early, []
        while not self._inbox.empty():
            words.append(self._inbox.get())
        for word in words:
            if self._is_early(word):
                self._early.append(word)
            else:
                self._handle(word)

    def _is_early(self, word: Word) -> bool:
        if not (
            isinstance(word, Update) and self.replica.progress.is_lockstep and word.fragment in self.replica.pieces
        ):
            return False
        sent = self.replica.pieces[word.fragment].sent
        return sent is not None and sent.due > self.replica.num_steps

    def await_due(self) -> None:
        begun = time.monotonic()
        self.handle_all()
        while self.replica.awaited():
            word = self._next(self._timeout_s, "the result of a round; see what the other members do")
            if self._is_early(word):
                self._early.append(word)
            else:
                self._handle(word)
        self.waited_s += time.monotonic() - begun


def connected(address: str, timeout_s: float) -> Connection:
    """A connection to a server, after the handshake."""
    where = Address.by_hand(*address_of(address))
    cure = "see that `laconic serve` runs there, with TLS if this end has it, and only then"
    return connect(where, 0, "the server", timeout_s, caller="this process", cure=cure)
