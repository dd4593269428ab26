"""join(address, model, optimizer): one line, no ranks, no process group; members come and go while the run goes on."""

from __future__ import annotations

import json
import logging
import math
import platform
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from zlib import crc32

import torch
from torch import nn

from laconic.errors import LaunchError, PeerError, StateError
from laconic.members.host import address_of
from laconic.members.messages import PROTOCOL, Join, Line, Offer, Refusal, Report, Status, Update, Word
from laconic.members.replica import Replica, check_elastic
from laconic.members.syncer import fingerprint_of, stated_layouts
from laconic.recipes import parse
from laconic.replicas import Optimizers, drop_nonfinite_moments_, inner_momentum
from laconic.transport import Address, Connection, connect, longest_message

_LOG = logging.getLogger("laconic.members")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0  # between two attempts to reach a server that is gone
_CONNECT_S = 10.0
_REPORT_BYTES = 1 << 24
_REMIND_S = 30.0  # between two lines about a server that is waited for


@dataclass(frozen=True)
class MemberStats:
    """A member's account."""

    id: str
    scheme: str
    steps: int  # of training, by this member
    rounds: int  # its drifts that were counted
    late_rounds: int  # its drifts that came after their round was closed, and went again in the next
    residual_norm: float  # what rounding and selection hold back
    waited_s: float  # in lockstep: for results that were due
    reconnects: int
    bytes_out: int
    bytes_in: int
    run_tokens: int  # of all members, in drifts that were counted
    run_rounds: int
    num_members: int  # when the server last told


class Member:
    """A model that trains apart and takes part in a run while it is there; call `step()` after each optimizer step.

    A server that cannot be reached stops nobody: training goes on, and what was learned meanwhile goes when it is back.
    """

    _line: Line

    def __init__(
        self,
        address: str,
        model: nn.Module,
        optimizer: Optimizers,
        id: str,
        timeout_s: float,
        state: Mapping[str, Any] | None,
    ) -> None:
        self.id = id
        self.error: BaseException | None = None
        self._address = address
        self._optimizer = optimizer
        self._timeout_s = timeout_s
        self._longest = max(1 << 20, longest_message(list(model.parameters())))
        self._inbox: queue.SimpleQueue[Word] = queue.SimpleQueue()
        self._early: list[Word] = []  # in lockstep: results that came before they are due
        self._is_open = True
        self._waited_s = 0.0
        self._num_connections = 0
        self._ended_bytes_out = self._ended_bytes_in = 0  # of connections before this one
        self._join: Join | None = None
        self._dial()
        try:
            self._begin(model, state)
        except BaseException:
            self.close()
            raise

    def _begin(self, model: nn.Module, state: Mapping[str, Any] | None) -> None:
        """Learn what runs, and join it; a connection that ends meanwhile is made again."""
        offer = self._next(self._timeout_s, "its offer")
        if not isinstance(offer, Offer) or offer.protocol != PROTOCOL:
            raise LaunchError(
                f"the server at {self._address} runs another release of laconic; install the same everywhere"
            )
        self._offer = offer
        scheme = check_elastic(parse(offer.scheme))
        self.replica = Replica(model, scheme, secrets.randbits(31), crc32(self.id.encode()))
        if state is not None:
            self.replica.load_state_dict(state)
        self._take_part()

    def _take_part(self) -> None:
        """Join, or come back, and wait for the anchors."""
        layouts = self.replica.layouts
        beta = inner_momentum(self._optimizer)
        self._join = Join(self.id, self.replica.generation, fingerprint_of(layouts), beta, stated_layouts(layouts))
        self._line.send(self._join)
        while not self.replica.is_ready or any(piece.is_asking for piece in self.replica.pieces.values()):
            self._handle(self._next(self._timeout_s, "its anchors"))

    @property
    def progress(self) -> tuple[int, int]:
        """(tokens, rounds) of the whole run: what a learning-rate schedule should go by, so that no joiner lags."""
        return self.replica.progress.tokens, self.replica.progress.rounds

    @property
    def num_members(self) -> int:
        """How many there were when the server last told."""
        return self.replica.progress.num_members

    def step(self, tokens: int = 1, **report: float) -> None:
        """Apply what has come, and send what is due; nothing is waited for, but in lockstep.

        Args:
            tokens: What this step trained on: the weight of this member's drift in the mean. All members count alike.
            report: What the server's page should show of this member, like `loss=2.31`.

        Raises:
            PeerError: The server has refused this member, or begun another run.
        """
        self._check_open()
        self._handle_all()
        for word in self.replica.after_step(tokens, {name: float(value) for name, value in report.items()}):
            self._line.send(word)
        self._heal_optimizer()
        if self.replica.progress.is_lockstep:
            self._await_due()

    def leave(self, timeout_s: float = 60.0) -> None:
        """Hand what this member owes to the server, which adds it to the next mean, and end; nothing is lost.

        Raises:
            PeerError: The server could not be reached in time; the text states what is lost with this member.
        """
        self._check_open()
        try:
            for word in self.replica.leave():
                self._line.send(word)
            while not self.replica.has_left:
                self._handle(self._next(timeout_s, "that all has come"))
        except LaunchError as error:
            lost = self.replica.stats()["residual_norm"]
            raise PeerError(f"{error}; a residual of norm {lost:.3g} is lost with this member") from None
        finally:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """What this member needs to come back after its process has ended: save it with the model and the optimizer.

        Example:
            >>> state = {"model": model.state_dict(), "member": member.state_dict()}
            >>> model.load_state_dict(state["model"])
            >>> member = laconic.join(address, model, optimizer, state=state["member"])
        """
        return {"id": self.id, **self.replica.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the process that saved this, on a model that was loaded to what it was then.

        `join(..., state=...)` does so without fetching the anchors twice.

        Raises:
            StateError: It is of another member, scheme or model.
        """
        self._check_open()
        _check_id(state, self.id)
        self.replica.load_state_dict(state)
        self._take_part()

    def close(self) -> None:
        """End without handing anything over."""
        self._is_open = False
        self._line.close()

    def stats(self) -> MemberStats:
        """What this member sent and received, and where the run stands."""
        counted = self.replica.stats()
        del counted["versions"]
        progress = self.replica.progress
        return MemberStats(
            id=self.id,
            scheme=self._offer.scheme,
            waited_s=self._waited_s,
            reconnects=self._num_connections - 1,
            bytes_out=self._ended_bytes_out + self._line.bytes_out,
            bytes_in=self._ended_bytes_in + self._line.bytes_in,
            run_tokens=progress.tokens,
            run_rounds=progress.rounds,
            num_members=progress.num_members,
            **counted,
        )

    def metrics(self) -> dict[str, float]:
        """The numbers of `stats()`, for a monitor."""
        return {name: float(value) for name, value in asdict(self.stats()).items() if not isinstance(value, str)}

    def __repr__(self) -> str:
        return f"Member({self.id!r} at {self._address}, {self._offer.scheme}, {self.replica.num_steps} steps)"

    # The connection

    def _dial(self) -> None:
        connection = _connected(self._address, min(_CONNECT_S, self._timeout_s))
        self._num_connections += 1
        if self._num_connections > 1:
            self._ended_bytes_out += self._line.bytes_out
            self._ended_bytes_in += self._line.bytes_in
        self._line = Line(connection, self._on_word, self._on_end, self._longest)
        self._line.start()  # its first word may come before this returns

    def _on_word(self, word: Word) -> None:
        """In the line's thread: who comes back says so at once; all else waits for the training thread."""
        if isinstance(word, Offer) and self._join is not None:
            self._line.send(self._join)
        else:
            self._inbox.put(word)

    def _on_end(self, why: str) -> None:
        if self._is_open:
            _LOG.warning("the connection to %s has ended (%s); training goes on meanwhile", self._address, why)
            threading.Thread(target=self._dial_again, name="laconic-member-dial", daemon=True).start()

    def _dial_again(self) -> None:
        """Try until the server is back, less often with time."""
        pause_s = _FIRST_PAUSE_S
        begun = reminded = time.monotonic()
        self._line.close()
        while self._is_open and self.error is None:
            try:
                self._dial()
                return
            except LaunchError:
                time.sleep(pause_s * (0.5 + torch.rand(()).item()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
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

    def _check_open(self) -> None:
        if self.error is not None:
            raise self.error
        if not self._is_open:
            raise StateError("this member has left; join anew")

    # What has come

    def _handle(self, word: Word) -> None:
        if isinstance(word, Refusal):
            self._refuse(word)
        if isinstance(word, Status) and word.lost_norm:
            _LOG.warning(
                "a residual of norm %.3g is lost with the process that was %r before; join with its state to keep it",
                word.lost_norm,
                self.id,
            )
        for reply in self.replica.on_word(word):
            self._line.send(reply)

    def _handle_all(self) -> None:
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

    def _await_due(self) -> None:
        begun = time.monotonic()
        self._handle_all()
        while self.replica.awaited():
            word = self._next(self._timeout_s, "the result of a round; see what the other members do")
            if self._is_early(word):
                self._early.append(word)
            else:
                self._handle(word)
        self._waited_s += time.monotonic() - begun

    def _heal_optimizer(self) -> None:
        """Drop the moments of a model that had to go back to its anchor, where they are not finite."""
        if self.replica.num_healed:
            self.replica.num_healed = 0
            drop_nonfinite_moments_(self._optimizer)


def join(
    address: str,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    id: str = "",
    timeout_s: float = 60.0,
    state: Mapping[str, Any] | None = None,
) -> Member:
    """Let a model take part in the run of a server that `laconic serve --listen` started, until it leaves or dies.

    The server says what scheme runs. The first member's model begins the run; that of every later one is overwritten
    by where the run stands. Only this process dials: nothing has to be open here.

    Args:
        address: The server's "host:port".
        model: The bare model, the same on all members.
        optimizer: The one that trains it, or several; call member.step() after each of its steps.
        id: A name that no other member has, by which this one is known when it comes back; drawn unless given.
        timeout_s: How long the server may take to answer here; in lockstep also for the result of a round.
        state: What `state_dict()` of a member returned whose process has ended. Load the model and the optimizer that
            were saved with it before; what it had not sent goes when it is due, and nothing is counted twice.

    Returns:
        A member: step(), progress, leave(), stats(), metrics(), state_dict(), close().

    Raises:
        LaunchError: The server cannot be reached, or does not know the same secret.
        PeerError: The server refuses this member; the text says why.
        StateError: The state is of another member, scheme or model.

    Example:
        >>> server = laconic.MemberServer("streaming", "127.0.0.1:0")
        >>> member = laconic.join(server.address, model, optimizer)
        >>> optimizer.step(); member.step(tokens=4096)
        >>> member.leave()
    """
    if not 0 < timeout_s < math.inf:
        raise LaunchError(f"timeout_s is {timeout_s}; give seconds above 0")
    if state is not None:
        id = _check_id(state, id)
    made_id = id or f"{platform.node()}-{secrets.token_hex(3)}"
    return Member(address, model, optimizer, made_id, timeout_s, state)


def _check_id(state: Mapping[str, Any], id: str) -> str:
    """The id of the member that saved a state."""
    saved_id = str(state.get("id", ""))
    if id not in ("", saved_id):
        raise StateError(f"the state is of the member {saved_id!r}, not {id!r}; give the id that it was saved under")
    return saved_id


def run_stats(address: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """What the server at an address says of its run, its members and its traffic.

    Raises:
        LaunchError: It cannot be reached, does not know the same secret, or does not answer.
    """
    words: queue.SimpleQueue[Word] = queue.SimpleQueue()
    line = Line(_connected(address, timeout_s), words.put, lambda why: None, _REPORT_BYTES)
    line.start()
    line.send(Report())
    try:
        while not isinstance(word := words.get(timeout=timeout_s), Report):
            pass
    except queue.Empty:
        raise LaunchError(f"the server at {address} has not answered for {timeout_s:g} s") from None
    finally:
        line.close()
    stats: dict[str, Any] = json.loads(word.text)
    return stats


def _connected(address: str, timeout_s: float) -> Connection:
    """A connection to a server, after the handshake."""
    where = Address.by_hand(*address_of(address))
    cure = "see that `laconic serve` runs there"
    return connect(where, 0, "the server", timeout_s, caller="this process", cure=cure)
