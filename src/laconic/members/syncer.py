"""The server's half of elastic outer steps as a state machine: it is told what came and when, and says what to send.

It opens nothing and waits for nothing, so a test drives thousands of schedules through it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.errors import FrameError, StateError
from laconic.layout import Layout
from laconic.members.codec import codec_for, exact_codec
from laconic.members.combine import Combine, at_most_median, inner_products
from laconic.members.fragment import MOST_GONE, FragmentState
from laconic.members.masks import KEY, OpenSum, SumGrid, check_masks, most_members
from laconic.members.messages import (
    MOST_TOKENS,
    Anchor,
    Bequest,
    Call,
    Codes,
    Drift,
    Join,
    Keys,
    Leave,
    Outgoing,
    Request,
    Roster,
    Status,
    Update,
    Word,
)
from laconic.outer import OuterMomentum, OuterSGD
from laconic.scheme import OuterScheme, write_part

_LOG = logging.getLogger("laconic.members")
_ANSWERS = 64  # whose delays the wait budget follows
_MAD = 4.0  # median + 4 * MAD: who answers as members usually do is waited for
_MOST_REPORTED, _NAME = 16, 64  # numbers that a member may report, and characters of a name
_MOST_MOMENTUM = 0.999
_LARGEST = 1e18  # norm of a drift: its square is a float32
_NOT_FINITE = "sent numbers that are not finite, or as good as that"
_LEAST_SUM_WAIT_S, _MOST_SUM_WAITS = 1.0, 64  # for codes; and how many times as long it may become
_MOST_MISSED = 3  # calls without an answer, after which a member is not waited for until something of it comes


def process_of(id: str, generation: int) -> str:
    """A process among all that ever joined: its residual is that of no other with the same id."""
    return f"{id}/{generation}"


@dataclass
class MemberRecord:
    """What the server knows of a member; it stays when the member is gone."""

    id: str
    generation: int  # of the process that joined under this id: another one has another residual
    connection: int | None = None  # the one that it is reached by, if it is there
    address: str = ""
    key: str = ""  # under masks: the process's public one
    tokens: int = 0  # in drifts that were counted
    steps: int = 0
    rounds: int = 0  # drifts of its that were counted
    num_late: int = 0
    num_missed: int = 0  # calls without an answer since its last message
    residual_norms: dict[int, float] = field(default_factory=dict)  # as of its last drift, by fragment
    share: float = 1.0  # of its last drift that a rule let in
    clipped_norm: float = 0.0  # of all that a rule kept out
    subscribed: set[int] = field(default_factory=set)  # fragments whose updates it is sent
    report: dict[str, float] = field(default_factory=dict)  # its own numbers, like its loss
    seen_at: float = 0.0

    @property
    def process(self) -> str:
        """The process that has its residual, among all that ever joined."""
        return process_of(self.id, self.generation)

    @property
    def residual_norm(self) -> float:
        """What would be lost with it, as it last stated that."""
        return math.hypot(*self.residual_norms.values())


class Syncer:
    """Anchors, versions, members and the clock of a run; each method returns the messages that are to leave.

    Args:
        scheme: How drifts are written, how often they go, and what the outer step does with their mean.
        quorum: Drifts without which no round is closed.
        wait_budget_s: The longest that a round waits for members after it called them; it adapts below that.
        is_lockstep: Whether a round waits for all members that are there, whatever that takes.
        combine: What is made of the drifts of a round: the mean, or a rule for members who may lie.
        mask_bits: Bits of a code under masks, of which this server reads the sum alone; 0: drifts come in clear.
        save: Called with a fragment's number and state before anyone is told of its new version.
    """

    def __init__(
        self,
        scheme: OuterScheme,
        *,
        quorum: int = 1,
        wait_budget_s: float = 10.0,
        is_lockstep: bool = False,
        combine: str = "mean",
        mask_bits: int = 0,
        save: Callable[[int, dict[str, Any]], None] = lambda number, state: None,
    ) -> None:
        self.scheme = scheme
        self.quorum = quorum
        self.is_lockstep = is_lockstep
        self.combine = Combine.parse(combine)
        self.mask_bits = mask_bits
        if mask_bits:
            check_masks(scheme, mask_bits, self.combine)
            self.quorum = max(2, quorum)  # a sum of one would show it
        self.longest_wait_s = wait_budget_s
        self.members: dict[str, MemberRecord] = {}
        self.fragments: dict[int, FragmentState] = {}
        self.layouts: dict[int, Layout] = {}
        self.run = secrets.token_hex(8)
        self.rounds = 0
        self.ids: dict[int, str] = {}  # of members, by connection
        self.lost_norm = 0.0  # of all residuals that ended with a process
        self._founder = ""  # who sends the first anchors
        self._founder_generation = -1
        self._inner_momentum = 0.0  # of the founder's optimizer
        self._returning: set[str] = set()  # processes of the last rounds before a restart that are not back yet
        self._returns_until = math.inf
        self._delays: deque[float] = deque(maxlen=_ANSWERS)
        self._least_sum_wait_s = max(wait_budget_s, _LEAST_SUM_WAIT_S)
        self._sum_wait_s = self._least_sum_wait_s  # for codes, which take a step of training and their way
        self._save = save
        self._scratch = torch.empty(0)

    # Who is there

    def on_join(self, connection: int, join: Join, now: float, address: str = "") -> list[Outgoing]:
        """Let a member in, or back, and tell it where the run stands; FrameError where it cannot take part."""
        if self._has_left(process_of(join.id, join.generation)):
            return [Outgoing(connection, Leave())]
        layouts = _layouts_of(join)
        has_model = self._is_founded or self._founder
        if fingerprint_of(layouts) != join.fingerprint or (has_model and layouts != self.layouts):
            raise FrameError("its model is another one than that of this run; build the same model, in the same order")
        if not (KEY.fullmatch(join.key) if self.mask_bits else join.key == ""):
            raise FrameError("its drifts are masked where this run's are not, or the reverse; join anew")
        others = [other for other in self.members.values() if other.connection is not None and other.id != join.id]
        if self.mask_bits and join.key in {other.key for other in others}:
            raise FrameError("its key is another member's; draw one anew")
        if self.mask_bits and len(others) >= most_members(self.mask_bits) - 1:
            raise FrameError(f"a run in codes of {self.mask_bits} bits is full; serve another one, in more bits")
        member = self.members.get(join.id) or MemberRecord(join.id, join.generation)
        lost_norm = 0.0
        if member.generation != join.generation:  # another process, which has not the residual of the one before
            if member.connection not in (None, connection):
                raise FrameError(f"a member called {join.id!r} is there already; give each member an id of its own")
            lost_norm = self._write_off(member)
            member = MemberRecord(join.id, join.generation)
        voided = self._void_sums_of(member.process)
        self.members[join.id] = member
        member.connection, member.address, member.seen_at, member.num_missed = connection, address, now, 0
        member.key = join.key
        member.subscribed = set()
        self.ids[connection] = join.id
        self._returning = {process for process in self._returning if process.rpartition("/")[0] != join.id}
        self._returns_until = min(self._returns_until, now + self.longest_wait_s)
        self.layouts = layouts
        if not self._is_founded and self._founder in ("", join.id):
            self._inner_momentum = min(join.inner_momentum, _MOST_MOMENTUM)
            self._begin_founding(join.id)
        status = Outgoing(connection, replace(self.status(), lost_norm=lost_norm))
        if not self.mask_bits:
            return [status]
        present = {other.process: other.key for other in [*others, member]}
        news = [
            Outgoing(self._connection(other.id), Keys({member.process: member.key}, is_all=False)) for other in others
        ]
        return [status, Outgoing(connection, Keys(present, is_all=True)), *news, *voided]

    def on_lost(self, connection: int, now: float) -> list[Outgoing]:
        """Continue without a member that has left, or whose connection has ended; what it sent counts."""
        id = self.ids.pop(connection, "")
        member = self.members.get(id)
        if member is None or member.connection != connection:  # it is back by another one
            return []
        member.connection = None
        self.members[id] = self.members.pop(id)  # the last of those that are gone
        gone = [other for other in self.members.values() if other.connection is None]
        for other in gone[:-MOST_GONE]:
            self._write_off(other)
        outgoing = self._without(member) if self.mask_bits else []
        if id == self._founder and not self._is_founded:
            present = [other.id for other in self.members.values() if other.connection is not None]
            self._begin_founding(present[0] if present else "")
            return [*outgoing, *self._statuses()]
        return [*outgoing, *self.on_time(now)]

    def _write_off(self, member: MemberRecord) -> float:
        """Forget a member that does not come back; the norm of what is lost with it."""
        self.lost_norm = math.hypot(self.lost_norm, member.residual_norm)
        del self.members[member.id]
        return member.residual_norm

    def status(self) -> Status:
        """Where the run stands."""
        return Status(
            run=self.run,
            founder=self._founder_generation,
            is_founded=self._is_founded,
            tokens=self.tokens,
            rounds=self.rounds,
            num_members=self.num_members,
            is_lockstep=self.is_lockstep,
        )

    @property
    def tokens(self) -> int:
        """Those in drifts that were counted: the clock of the run."""
        return self.fragments[min(self.fragments)].tokens if self.fragments else 0

    @property
    def num_members(self) -> int:
        """How many are there."""
        return sum(member.connection is not None for member in self.members.values())

    @property
    def _is_founded(self) -> bool:
        return bool(self.layouts) and self.fragments.keys() == self.layouts.keys()

    def _has_left(self, process: str) -> bool:
        """Whether a process has handed over all that it owed."""
        departed = [process in fragment.departed for fragment in self.fragments.values()]
        return bool(departed) and all(departed)

    def _begin_founding(self, id: str) -> None:
        """Await the first anchors from this member, all of them."""
        self._founder = id
        self._founder_generation = self.members[id].generation if id else -1
        self.fragments = {}

    def _statuses(self) -> list[Outgoing]:
        """Tell all that are there where the run stands."""
        connections = [member.connection for member in self.members.values() if member.connection is not None]
        return [Outgoing(connection, self.status()) for connection in connections]

    def _present(self) -> set[str]:
        return {member.process for member in self.members.values() if member.connection is not None}

    def _connection(self, id: str) -> int:
        connection = self.members[id].connection
        assert connection is not None
        return connection

    # What comes

    def on_word(self, connection: int, word: Word, now: float, address: str = "") -> list[Outgoing]:
        """Do what a message of a member says; FrameError where that is not a member's to send."""
        id = self.ids.get(connection)
        if isinstance(word, Join) and id in (None, word.id):
            return self.on_join(connection, word, now, address)
        if id is None:
            raise FrameError("sent something before it joined")
        if isinstance(word, Drift):
            outgoing = self.on_drift(id, word, now)
        elif isinstance(word, Codes):
            outgoing = self.on_codes(id, word, now)
        elif isinstance(word, Request):
            outgoing = self.on_request(id, word)
        elif isinstance(word, Anchor):
            outgoing = self.on_anchor(id, word)
        elif isinstance(word, Bequest):
            outgoing = self.on_bequest(id, word)
        elif isinstance(word, Leave):
            if self.mask_bits:
                self._depart(id)
            outgoing = [*self.on_lost(connection, now), Outgoing(connection, Leave())]
        else:
            raise FrameError(f"sent {type(word).__name__}, which is the server's to send")
        return outgoing

    def on_anchor(self, id: str, anchor: Anchor) -> list[Outgoing]:
        """Take a founder's fragment for the first anchor."""
        layout = self.layouts.get(anchor.fragment)
        if id != self._founder or layout is None or anchor.fragment in self.fragments:
            raise FrameError("sent an anchor where none is asked for")
        values = anchor.values()
        if values.numel() != layout.num_entries:
            raise FrameError(f"sent an anchor of {values.numel()} entries, not {layout.num_entries}")
        if not bool(values.isfinite().all()):
            raise FrameError("its model is not finite; begin a run with one that is")
        self._add_fragment(anchor.fragment, values)
        if not self._is_founded:
            return []
        for number in self.fragments:
            self._save(number, self._saved(number))
        return self._statuses()

    def on_request(self, id: str, request: Request) -> list[Outgoing]:
        """Send a member a fragment's anchor, where it has another version, and its updates from now on."""
        fragment = self.fragments.get(request.fragment)
        if fragment is None:
            raise FrameError(f"asks for fragment {request.fragment}, which does not exist")
        member = self.members[id]
        open_sum = fragment.round.open_sum
        if open_sum is not None and member.process in open_sum:
            open_sum.requests[self._connection(id)] = request
            return []
        member.subscribed.add(request.fragment)
        values = None if request.version == fragment.version else fragment.anchor
        drifts = fragment.round.drifts
        held = drifts.get(member.process)
        if held is not None and held.number != request.pending:  # it was restored from before it sent that one
            del drifts[member.process]
        counted = fragment.last_counted(member.process, request.version)
        facts = fragment.version, values, counted, request.question
        anchor = Anchor.of(request.fragment, *facts, is_held=member.process in drifts)
        return [Outgoing(self._connection(id), anchor)]

    def on_drift(self, id: str, drift: Drift, now: float) -> list[Outgoing]:
        """Take a drift for the round of its version; one that comes after it was closed stays with its sender."""
        member = self.members[id]
        member.seen_at, member.num_missed = now, 0
        if not 1 <= drift.tokens <= MOST_TOKENS:
            raise FrameError(f"sent a drift of {drift.tokens} tokens")
        numbers = {name[:_NAME]: float(v) for name, v in drift.report.items() if _is_number(v)}
        member.report = dict(list(numbers.items())[:_MOST_REPORTED])
        fragment = self.fragments.get(drift.fragment)
        if fragment is None or drift.version > fragment.version:
            raise FrameError(f"sent a drift from version {drift.version} of fragment {drift.fragment}")
        if drift.version < fragment.version:
            member.num_late += 1
            return []
        open_sum = fragment.round.open_sum
        if self.mask_bits and (drift.payload.numel() or (open_sum is not None and member.process in open_sum)):
            raise FrameError("sent a drift in clear, or a second one, in a masked run")
        member.residual_norms[drift.fragment] = drift.residual_norm
        fragment.round.drifts[member.process] = drift
        if fragment.round.called_at < now:
            self._delays.append(now - fragment.round.called_at)
        return self.on_time(now)

    def on_bequest(self, id: str, bequest: Bequest) -> list[Outgoing]:
        """Take what a member that leaves has not sent, to be added to the next mean."""
        fragment = self.fragments.get(bequest.fragment)
        values = bequest.payload.view(torch.float32) if bequest.payload.numel() % 4 == 0 else bequest.payload
        fits = fragment is not None and values.shape == fragment.anchor.shape and 0 < bequest.tokens <= MOST_TOKENS
        if fragment is None or self.mask_bits or not fits or not bool(values.isfinite().all()):
            raise FrameError(f"handed over something of fragment {bequest.fragment} that is no drift")
        member = self.members[id]
        fragment.inherit_(member.process, values, bequest.tokens, self._present())
        member.residual_norms.pop(bequest.fragment, None)
        self._save(bequest.fragment, self._saved(bequest.fragment))
        return []

    # Rounds

    def on_time(self, now: float) -> list[Outgoing]:
        """Call members for the rounds that wait for them, and close those that are complete or have waited enough."""
        return [message for number in sorted(self.fragments) for message in self._advance(number, now)]

    @property
    def wait_budget_s(self) -> float:
        """How long a round waits after its call: as long as answers usually take."""
        if len(self._delays) < 2 * _MOST_MISSED:
            return self.longest_wait_s
        usual = statistics.median(self._delays)
        spread = statistics.median(abs(delay - usual) for delay in self._delays)
        return min(self.longest_wait_s, usual + _MAD * spread)

    @property
    def has_drifts(self) -> bool:
        """Whether a round is open that time may close."""
        return any(fragment.round.drifts for fragment in self.fragments.values())

    def _advance(self, number: int, now: float) -> Iterator[Outgoing]:
        """Call the members that a round waits for, or close it.

        After a restart all have drifted apart for long. Closed for each that comes back, a round would add up their
        drifts where it takes the mean, so the first ones wait for all of the last round before it, one wait budget.
        """
        fragment = self.fragments[number]
        round = fragment.round
        if round.open_sum is not None:
            yield from self._await_codes(number, round.open_sum, now)
            return
        drifts = self._addable(number) if self.mask_bits else round.drifts
        if len(drifts) < max(1, self.quorum) or (self._returning and now < self._returns_until):
            return
        awaited = [member for member in self._awaited(number) if member.process not in drifts]
        if awaited and self.is_lockstep:
            return
        if awaited and round.called_at == math.inf:
            if len(drifts) >= len(awaited):  # the median member has come as far as `every`
                round.called_at = now
                for member in awaited:
                    yield Outgoing(self._connection(member.id), Call(number, fragment.version))
            return
        if awaited and now < round.called_at + self.wait_budget_s:
            return
        for member in awaited:
            member.num_missed += 1
            # An answer that has not come would be missing among the delays, and the budget would shrink for good.
            self._delays.append(2 * (now - round.called_at))
        yield from self._announce(number, drifts, now) if self.mask_bits else self._close(number)

    def _awaited(self, number: int) -> list[MemberRecord]:
        """The members that are there, have the anchor, and answer."""
        present = [member for member in self.members.values() if member.connection is not None]
        return [m for m in present if number in m.subscribed and m.num_missed < _MOST_MISSED]

    def _close(self, number: int) -> Iterator[Outgoing]:
        """Take the outer step by what the rule makes of the drifts that came, and tell all that have the anchor.

        A drift that is let in is counted, once and for good: what a rule clips of it is lost, and its norm is stated.
        """
        fragment = self.fragments[number]
        drifts, tokens, mean = self._combined(number)
        present = self._present()
        for process, drift in drifts.items():
            fragment.count(process, drift.number, present)
        steps = sum(drift.tokens * drift.steps for drift in drifts.values()) // max(1, sum(tokens))
        length = max(1, steps // self.scheme.when.every)
        payload = fragment.step_(mean, number, len(drifts), length)
        fragment.tokens += sum(tokens)
        self.rounds += 1
        weights = dict(zip(drifts, tokens, strict=False))  # behind them may be the one of what was bequeathed
        for member in self.members.values():
            if counted := drifts.get(member.process):
                member.rounds += 1
                if number == min(self.fragments):  # tokens are in the drifts of all fragments
                    member.tokens += weights[member.process]
                    member.steps += counted.steps
        self._save(number, self._saved(number))
        for member in self.members.values():
            if member.connection is not None and number in member.subscribed:
                is_counted = member.process in drifts
                update = Update(
                    number, fragment.version, is_counted, self.tokens, self.rounds, self.num_members, payload
                )
                yield Outgoing(member.connection, update)

    def _combined(self, number: int) -> tuple[dict[str, Drift], list[int], Tensor | None]:
        """(the drifts of a round that can be read, the tokens that each weighs, what the rule makes of them).

        What was bequeathed is one drift more, behind them. Of nothing a rule makes None.
        """
        fragment = self.fragments[number]
        if fragment.round.open_sum is not None:
            return self._summed(fragment, fragment.round.open_sum)
        if self.combine.rule != "mean":
            return self._combined_by_rule(number, fragment)
        drifts: dict[str, Drift] = {}
        total = fragment.bequeathed.clone()
        for process, values in _decoded(fragment):
            if not float(values.norm()) < _LARGEST:
                _leave_out(process, _NOT_FINITE)
                continue
            drifts[process] = drift = fragment.round.drifts[process]
            total.add_(values, alpha=float(drift.tokens))
        tokens = [drift.tokens for drift in drifts.values()]
        if fragment.bequeathed_tokens:
            tokens.append(fragment.bequeathed_tokens)
        return drifts, tokens, total.div_(sum(tokens)) if tokens else None

    def _combined_by_rule(
        self, number: int, fragment: FragmentState
    ) -> tuple[dict[str, Drift], list[int], Tensor | None]:
        """The same under a rule for members who may lie, as may who left what was bequeathed."""
        rows = self._rows_for(len(fragment.round.drifts) + 1, fragment.anchor)
        processes: list[str] = []
        for process, values in _decoded(fragment):
            rows[len(processes)] = values
            processes.append(process)
        num_drifts = len(processes)
        if fragment.bequeathed_tokens:
            torch.div(fragment.bequeathed, fragment.bequeathed_tokens, out=rows[num_drifts])
        rows = rows[: num_drifts + (fragment.bequeathed_tokens > 0)]
        products = inner_products(rows)  # their diagonal says what a norm of each would
        fits = (products.diagonal() < _LARGEST**2).tolist()
        for process, fit in zip(processes, fits, strict=False):
            if not fit:
                _leave_out(process, _NOT_FINITE)
        if not all(fits):
            fitting = [i for i, fit in enumerate(fits) if fit]
            rows, products = rows[fitting], products[np.ix_(fitting, fitting)]
        drifts = {process: fragment.round.drifts[process] for process, fit in zip(processes, fits, strict=False) if fit}
        tokens = [drift.tokens for drift in drifts.values()]
        if fragment.bequeathed_tokens and fits[-1]:
            tokens.append(fragment.bequeathed_tokens)
        if not tokens:
            return drifts, tokens, None
        tokens = at_most_median(tokens)
        combined = self.combine(rows, tokens, f"{number}/{fragment.version}", products)
        clipped = dict(zip(drifts, zip(combined.shares, combined.clipped_norms, strict=True), strict=False))
        for member in self.members.values():
            if member.process in clipped:
                member.share, clipped_norm = clipped[member.process]
                member.clipped_norm += clipped_norm
        return drifts, tokens, combined.drift

    # Under masks

    def _addable(self, number: int) -> dict[str, Drift]:
        """The drifts that were announced by members who are there, and know what became of their last one."""
        drifts = self.fragments[number].round.drifts
        present = [member for member in self.members.values() if member.connection is not None]
        return {m.process: drifts[m.process] for m in present if number in m.subscribed and m.process in drifts}

    def _announce(self, number: int, drifts: Mapping[str, Drift], now: float) -> Iterator[Outgoing]:
        """Open a sum: tell whose drifts are in it, all of whom then send their codes."""
        fragment = self.fragments[number]
        assert fragment.grid is not None
        numbers = {process: drift.number for process, drift in drifts.items()}
        tokens = sum(drift.tokens for drift in drifts.values())
        exponents = fragment.grid.exponents.view(torch.uint8)
        roster = Roster(number, fragment.version, fragment.round.num_sums, tokens, numbers, exponents)
        fragment.round.num_sums += 1
        fragment.round.open_sum = OpenSum(roster, fragment.grid.zeros(), now, set(numbers))
        for member in self.members.values():
            if member.process in numbers:
                yield Outgoing(self._connection(member.id), roster)

    def on_codes(self, id: str, codes: Codes, now: float) -> list[Outgoing]:
        """Add a member's codes to the sum that it was asked for; those for one that is void are of no use."""
        member = self.members[id]
        member.seen_at, member.num_missed = now, 0
        fragment = self.fragments.get(codes.fragment)
        open_sum = fragment and fragment.round.open_sum
        if not fragment or not fragment.grid or not open_sum or open_sum.roster.digest().hex() != codes.roster:
            return []
        if member.process in open_sum.missing:
            open_sum.add(member.process, fragment.grid.words(codes.payload))
        return self.on_time(now)

    def _await_codes(self, number: int, open_sum: OpenSum, now: float) -> Iterator[Outgoing]:
        """Close a round whose sum is whole; one that somebody holds up goes on without it.

        How long it waits follows from how long codes took: where all are slow, each sum that is given up doubles it.
        Its connection ends before the others' next codes are asked for: the difference of two sums would be its drift.
        """
        waited_s = now - open_sum.announced_at
        if not open_sum.missing:
            self._sum_wait_s = max(self._least_sum_wait_s, 4 * waited_s, 0.9 * self._sum_wait_s)
            yield from self._close(number)
            yield from self._answer(open_sum)
        elif not self.is_lockstep and waited_s >= self._sum_wait_s:
            self._sum_wait_s = min(2 * self._sum_wait_s, _MOST_SUM_WAITS * self._least_sum_wait_s)
            overdue = [self._connection(m.id) for m in self.members.values() if m.process in open_sum.missing]
            for process in open_sum.missing:
                del self.fragments[number].round.drifts[process]
            self.fragments[number].round.open_sum = None
            yield from self._answer(open_sum)
            for connection in overdue:
                yield Outgoing(connection, None)
                yield from self.on_lost(connection, now)

    def _without(self, member: MemberRecord) -> list[Outgoing]:
        """Tell the others that one is gone, and end the sums that wait for it."""
        present = [other.connection for other in self.members.values() if other.connection is not None]
        news = [Outgoing(connection, Keys({member.process: ""}, is_all=False)) for connection in present]
        return [*news, *self._void_sums_of(member.process)]

    def _void_sums_of(self, process: str) -> list[Outgoing]:
        """End the sums that lack the codes of a process whose connection has ended: they never come."""
        outgoing: list[Outgoing] = []
        for fragment in self.fragments.values():
            open_sum = fragment.round.open_sum
            if open_sum is not None and process in open_sum.missing:
                fragment.round.open_sum = None
                outgoing += self._answer(open_sum)
        return outgoing

    def _answer(self, open_sum: OpenSum) -> list[Outgoing]:
        """Tell who came back while its codes were in a sum what became of them."""
        requests = [(self.ids[number], request) for number, request in open_sum.requests.items() if number in self.ids]
        return [message for id, request in requests for message in self.on_request(id, request)]

    def _summed(self, fragment: FragmentState, open_sum: OpenSum) -> tuple[dict[str, Drift], list[int], Tensor | None]:
        """(the drifts that are in a sum, all of their tokens, their mean)."""
        assert fragment.grid is not None
        mean = fragment.grid.mean(open_sum.words, len(open_sum.roster.numbers), fragment.anchor.device)
        if mean is None:
            _LOG.warning("a sum is left out: its masks do not cancel; give all members the same LACONIC_MASK_SECRET")
            return {}, [], None
        fragment.grid = fragment.grid.after(mean)
        drifts = {process: fragment.round.drifts[process] for process in open_sum.roster.numbers}
        return drifts, [drift.tokens for drift in drifts.values()], mean

    def _depart(self, id: str) -> None:
        """Let a member go that has nothing to leave behind but what its grid could not hold."""
        for number, fragment in self.fragments.items():
            fragment.depart(self.members[id].process, self._present())
            self._save(number, self._saved(number))

    def _rows_for(self, count: int, like: Tensor) -> Tensor:
        """Memory for so many vectors, kept between rounds: to get it anew takes longer than a rule does."""
        if self._scratch.numel() < count * like.numel():
            self._scratch = like.new_empty(count * like.numel())
        return self._scratch[: count * like.numel()].view(count, -1)

    # State

    def _add_fragment(self, number: int, anchor: Tensor) -> FragmentState:
        layout = self.layouts[number]
        scheme = self.scheme
        is_buffers = number == scheme.when.fragments  # of norms, which are averaged
        codec = exact_codec(layout) if is_buffers else codec_for(scheme.exchanged, layout)
        then = OuterSGD() if is_buffers else scheme.then
        momentum = OuterMomentum.of(then, anchor, scheme.when.every, self._inner_momentum)
        grid = SumGrid.at(self.mask_bits, anchor) if self.mask_bits else None
        self.fragments[number] = FragmentState(anchor, codec, then, momentum, grid)
        return self.fragments[number]

    def _saved(self, number: int) -> dict[str, Any]:
        """A fragment's state, with the run's clock and whose drifts it holds."""
        spans = [[span.name, list(span.shape)] for span in self.layouts[number].spans]
        return {
            **self.fragments[number].state_dict(),
            "scheme": str(self.scheme),
            "trigger": write_part("trigger", self.scheme.when),  # defaults of a recipe may change
            "mask_bits": self.mask_bits,
            "run": self.run,
            "founder": self._founder_generation,
            "inner_momentum": self._inner_momentum,
            "layout": spans,
            "fragments": sorted(self.layouts),
            "rounds": self.rounds,
            "lost_norm": self.lost_norm,
        }

    def load(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Continue a run from the states of all its fragments.

        Raises:
            StateError: They are of another scheme, or some are missing.
        """
        latest = max(states.values(), key=lambda state: int(state["rounds"]))
        trigger = write_part("trigger", self.scheme.when)
        if latest["scheme"] != str(self.scheme):
            raise StateError(
                f"the state is of {latest['scheme']}, and this server runs {self.scheme}; give that scheme"
            )
        if latest.get("trigger", "") != trigger:
            raise StateError(f"the state is of other rounds than trigger={trigger}; begin in an empty folder")
        if int(latest["mask_bits"]) != self.mask_bits:
            raise StateError(f"the state is of a run with mask_bits={latest['mask_bits']}; serve it with that")
        if missing := set(latest["fragments"]) - states.keys():
            raise StateError(f"the state has no fragment {min(missing)}; restore its file, or begin in an empty folder")
        self.run, self._founder_generation = str(latest["run"]), int(latest["founder"])
        self._inner_momentum = float(latest["inner_momentum"])
        self.rounds = int(latest["rounds"])
        self.lost_norm = float(latest["lost_norm"])
        for number, state in sorted(states.items()):
            self.layouts[number] = Layout.of([name for name, _ in state["layout"]], [s for _, s in state["layout"]])
            fragment = self._add_fragment(number, torch.empty_like(state["anchor"]))
            fragment.load_state_dict(state)
            self._returning |= fragment.last_round()


def _decoded(fragment: FragmentState) -> Iterator[tuple[str, Tensor]]:
    """(process, drift) of all drifts of a round that can be read."""
    for process, drift in sorted(fragment.round.drifts.items()):
        try:
            values = fragment.codec.decode(drift.payload, fragment.anchor.device)
        except FrameError as error:
            _leave_out(process, error)
        else:
            yield process, values


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < sys.float_info.max


def _leave_out(process: str, reason: object) -> None:
    _LOG.warning("the drift of member %r is left out: it %s", process, reason)


def _layouts_of(join: Join) -> dict[int, Layout]:
    """The layouts of a model's fragments, as a member states them; FrameError where they are none."""
    try:
        return {
            int(number): Layout.of([str(name) for name, _ in spans], [[int(n) for n in shape] for _, shape in spans])
            for number, spans in join.layouts.items()
        }
    except (TypeError, ValueError, OverflowError):
        raise FrameError("sent a layout that cannot be read; run the same release of laconic everywhere") from None


def stated_layouts(layouts: Mapping[int, Layout]) -> dict[str, Any]:
    """Layouts as a member states them."""
    return {str(n): [[span.name, list(span.shape)] for span in layout.spans] for n, layout in layouts.items()}


def fingerprint_of(layouts: Mapping[int, Layout]) -> str:
    """What two models must have in common to train together: names, shapes and their order."""
    text = repr([(n, [(span.name, span.shape) for span in layout.spans]) for n, layout in sorted(layouts.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
