"""join(address, model, optimizer): one line, no ranks, no process group; members come and go while the run goes on."""

from __future__ import annotations

import json
import math
import platform
import queue
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from laconic.errors import LaunchError, PeerError, StateError
from laconic.members.membership import Membership, connected
from laconic.members.messages import Line, Report, Word
from laconic.replicas import Optimizers, StepReminder, drop_nonfinite_moments_, inner_momentum

_REPORT_BYTES = 1 << 24


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

    def __init__(
        self,
        addresses: Sequence[str],
        model: nn.Module,
        optimizer: Optimizers,
        id: str,
        timeout_s: float,
        state: Mapping[str, Any] | None,
        *,
        is_masked: bool,
    ) -> None:
        self.id = id
        self.memberships: list[Membership] = []  # one for each server
        self._address = ",".join(addresses)
        self._optimizer = optimizer
        self._is_open = True
        self._reminder = StepReminder(optimizer, "member.step()")
        generation = secrets.randbits(31)
        try:
            for index, address in enumerate(addresses):
                share = (index, len(addresses))
                membership = Membership(address, model, id, generation, timeout_s, share, is_masked=is_masked)
                self.memberships.append(membership)
            self._check_schemes()
            if state is None:
                self._begin(self.memberships)
            else:
                self.load_state_dict(state)
        except BaseException:
            self.close()
            raise

    def _begin(self, memberships: Sequence[Membership]) -> None:
        """Join the servers in their order; who founds the run at the first one has done so at all others before."""
        if memberships:
            founds = memberships[0].begin(inner_momentum(self._optimizer))
            if founds:
                self._begin(memberships[1:])
            memberships[0].await_anchors()
            if not founds:
                self._begin(memberships[1:])

    @property
    def progress(self) -> tuple[int, int]:
        """(tokens, rounds) of the whole run: what a learning-rate schedule should go by, so that no joiner lags."""
        clocks = [membership.replica.progress for membership in self.memberships]
        return clocks[0].tokens, sum(clock.rounds for clock in clocks)

    @property
    def num_members(self) -> int:
        """How many there were when the first server last told."""
        return self.memberships[0].replica.progress.num_members

    def step(self, tokens: int = 1, **report: float) -> None:
        """Apply what has come, and send what is due; nothing is waited for, but in lockstep.

        Args:
            tokens: What this step trained on: the weight of this member's drift in the mean. All members count alike.
            report: What the server's page should show of this member, like `loss=2.31`.

        Raises:
            PeerError: The server has refused this member, or begun another run.
        """
        self._check_open()
        self._reminder.stop()
        numbers = {name: float(value) for name, value in report.items()}
        for membership in self.memberships:
            membership.handle_all()
            membership.send(membership.replica.after_step(tokens, numbers))
        self._heal_optimizer()
        for membership in self.memberships:
            if membership.replica.progress.is_lockstep:
                membership.await_due()

    def leave(self, timeout_s: float = 60.0) -> None:
        """Hand what this member has not sent to the server, which adds it to the next mean, and end; nothing is lost.

        Under masks it waits for a last sum in which others are, and what its codes cannot hold is lost, of a norm of
        `stats().residual_norm`; who is alone ends at once, with a warning that states what is lost.

        Raises:
            PeerError: The server could not be reached in time; the text states what is lost with this member.
        """
        self._check_open()
        try:
            for membership in self.memberships:
                membership.leave(timeout_s)
        finally:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """What this member needs to come back after its process has ended: save it with the model and the optimizer.

        Example:
            >>> state = {"model": model.state_dict(), "member": member.state_dict()}
            >>> model.load_state_dict(state["model"])
            >>> member = laconic.join(address, model, optimizer, state=state["member"])
        """
        return {"id": self.id, "replicas": [membership.replica.state_dict() for membership in self.memberships]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the process that saved this, on a model that was loaded to what it was then.

        `join(..., state=...)` does so without fetching the anchors twice.

        Raises:
            StateError: It is of another member, scheme or model, or of a run with another number of servers.
        """
        self._check_open()
        _check_id(state, self.id)
        replicas = state.get("replicas", [{}])
        if len(replicas) != len(self.memberships):
            raise StateError(f"the state is of a run with {len(replicas)} servers; give all of them, in the same order")
        for membership, saved in zip(self.memberships, replicas, strict=True):
            membership.replica.load_state_dict(saved)
        self._begin(self.memberships)

    def close(self) -> None:
        """End without handing anything over."""
        self._is_open = False
        self._reminder.stop()
        for membership in self.memberships:
            membership.close()

    def stats(self) -> MemberStats:
        """What this member sent and received, and where the run stands."""
        counts = [membership.replica.stats() for membership in self.memberships]
        tokens, rounds = self.progress
        return MemberStats(
            id=self.id,
            scheme=str(self.memberships[0].replica.scheme),
            steps=counts[0]["steps"],
            rounds=sum(count["rounds"] for count in counts),
            late_rounds=sum(count["late_rounds"] for count in counts),
            residual_norm=math.hypot(*(count["residual_norm"] for count in counts)),
            waited_s=sum(membership.waited_s for membership in self.memberships),
            reconnects=sum(membership.num_connections - 1 for membership in self.memberships),
            bytes_out=sum(membership.bytes_out for membership in self.memberships),
            bytes_in=sum(membership.bytes_in for membership in self.memberships),
            run_tokens=tokens,
            run_rounds=rounds,
            num_members=self.num_members,
        )

    def metrics(self) -> dict[str, float]:
        """The numbers of `stats()`, for a monitor."""
        return {name: float(value) for name, value in asdict(self.stats()).items() if not isinstance(value, str)}

    def __repr__(self) -> str:
        stats = self.stats()
        return f"Member({self.id!r} at {self._address}, {stats.scheme}, {stats.steps} steps)"

    def _check_schemes(self) -> None:
        schemes = {str(membership.replica.scheme) for membership in self.memberships}
        if len(schemes) > 1:
            raise PeerError(f"the servers at {self._address} run {' and '.join(sorted(schemes))}; serve one scheme")

    def _check_open(self) -> None:
        for membership in self.memberships:
            if membership.error is not None:
                self.close()
                raise membership.error
        if not self._is_open:
            raise StateError("this member has left; join anew")

    def _heal_optimizer(self) -> None:
        """Drop the moments of a model that had to go back to its anchor, where they are not finite."""
        replicas = [membership.replica for membership in self.memberships]
        if any(replica.num_healed for replica in replicas):
            for replica in replicas:
                replica.num_healed = 0
            drop_nonfinite_moments_(self._optimizer)


def join(
    address: str,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    id: str = "",
    timeout_s: float = 60.0,
    state: Mapping[str, Any] | None = None,
    is_masked: bool = False,
) -> Member:
    """Let a model take part in the run of a server that `laconic serve --listen` started, until it leaves or dies.

    The server says what scheme runs. The first member's model begins the run; that of every later one is overwritten
    by where the run stands. Only this process dials: nothing has to be open here.

    Args:
        address: The server's "host:port", or those of several with commas between: each keeps its share of the model's
            fragments. All members give the same ones in the same order.
        model: The bare model, the same on all members.
        optimizer: The one that trains it, or several; call member.step() after each of its steps.
        id: A name that no other member has, by which this one is known when it comes back; drawn unless given.
        timeout_s: How long the server may take to answer here; in lockstep also for the result of a round.
        state: What `state_dict()` of a member returned whose process has ended. Load the model and the optimizer that
            were saved with it before; what it had not sent goes when it is due, and nothing is counted twice.
        is_masked: Whether to refuse a server that sees single drifts, and not their sums alone.

    Returns:
        A member: step(), progress, leave(), stats(), metrics(), state_dict(), close().

    Raises:
        LaunchError: The server cannot be reached, or does not know the same secret.
        PeerError: The server refuses this member, or would see its drifts under `is_masked`; the text says why.
        SchemeError: The server adds up masked drifts, and cryptography is not installed.
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
    addresses = [part.strip() for part in address.split(",")]
    return Member(addresses, model, optimizer, made_id, timeout_s, state, is_masked=is_masked)


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
    line = Line(connected(address, timeout_s), words.put, lambda why: None, _REPORT_BYTES)
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
