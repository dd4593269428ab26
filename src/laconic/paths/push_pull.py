"""Each entry's owner hears of it from all workers and answers all of them."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.errors import StateError
from laconic.exchange import Server, Shares, piece_borders
from laconic.kernels import Recorder, has_zeros, nonzero
from laconic.layout import Layout
from laconic.memory import Account, Due, Ledger
from laconic.paths.choosing_on_gpu import ChoiceOnGpu
from laconic.paths.division import Answered, Division
from laconic.paths.frame_plan import FramePlan, FramePlans
from laconic.paths.path import Message, Path, Said, Speech, Taken, Work
from laconic.quantize import Quantizer, Trits
from laconic.server import Owner
from laconic.server.vote import take_sides
from laconic.transport import Push, Transport
from laconic.wire import FrameShape

# What is chosen: (positions, fixed and chosen values), or None where the gradient is not finite.
Choosing = Generator[Message, Any, tuple[Tensor, Tensor] | None]

_LENGTH_BYTES = 8  # before each message between workers that own shares


@dataclass
class PushPull(Path):
    """Deposit, choose, withdraw, push each owner its part; pull the answers.

    Owners are the workers themselves, each of a share of every bucket, or servers. `unions` count what was pushed of
    entries that are chosen among, and how many of those were answered.
    """

    plans: FramePlans
    server: Server
    quantize: Quantizer
    owner: Owner | None  # of this worker's own share, where workers own
    ledger: Ledger[Account]
    replays: bool  # whether a GPU that chooses asks nothing of the host

    def __post_init__(self) -> None:
        self._divisions: dict[Layout, Division] = {}
        self._on_gpu: dict[FramePlan, ChoiceOnGpu] = {}
        self._recorder: Recorder | None = None
        self._num_pushed = 0
        self._num_answered = 0

    @property
    def turns(self) -> Sequence[int]:
        """Parts, then answers."""
        return 0, self.transport.pull_turn

    def bytes_out(self, layout: Layout) -> int:
        up, down = self.up_and_down(layout)
        num_workers = self.transport.num_workers
        others = num_workers - 1
        return up * others // num_workers + down * others // num_workers + 2 * _LENGTH_BYTES * others

    def up_and_down(self, layout: Layout) -> tuple[int, int]:
        """Bytes that the parts of one worker and the answers of all owners come to, one copy of each.

        The sizes of parts and unions depend on what is chosen. This is for workers that choose independently and
        evenly, |U| = N*(1 - (1 - rho)^M): choices that have something in common come to less.
        """
        num_workers = self.transport.num_workers
        quantize = self.quantize
        plan = self.plans.target(layout, num_workers)
        rho = plan.k / max(1, plan.num_entries - plan.num_fixed)
        fixed_names = {span.name for span in plan.fixed}
        up = down = 0
        for own in Shares(layout, self.transport.num_shares).layouts:
            n = own.num_entries
            fixed = sum(span.num_entries for span in own.spans if span.name in fixed_names)
            union = math.ceil((n - fixed) * (1 - (1 - rho) ** num_workers))
            if self.server.down_rho:
                union = min(union, max(1, round(self.server.down_rho * n)))
            up += FrameShape(n, math.ceil((n - fixed) * rho), fixed, quantize).num_bytes
            forms = [FrameShape(n, union, fixed, quantize), FrameShape(n, n, 0, quantize)]
            if self.server.votes:
                decided = union + math.ceil(fixed * (1 - _ties(num_workers)))
                forms = [FrameShape(n, decided, 0, quantize), FrameShape(n, n, 0, Trits())]
            down += min(form.num_bytes for form in forms)
        return up, down

    def speak(self, work: Work) -> Speech:
        plan = self.plans.of(work)
        division = self._division(work.layout, plan)
        sent = None
        told = self._choose_on_gpu(work, plan) if self.looks_itself(work) else (yield from self._choose(work, plan))
        if told is not None:
            with self.clock.time("encode", work.device):
                parts, sent = division.parts(work, *told)
                sent = self.off_wire(sent, work.device)
        else:
            parts = division.overflows(work, self.transport.wire or work.device)
        push = Push(work.layout, work.step, work.number, parts, division.longest)
        heard = yield partial(self.transport.push, push)
        own = self._answer(work, heard)
        answers = yield partial(self.transport.pull, push, own)
        with self.clock.time("decode", work.device):
            answered = division.read(work, answers)
        return Said(answered, sent) if answered is not None else None

    def apply_(self, work: Work, said: Said) -> None:
        """Overwrite the bucket with what the owners said, and learn from it."""
        answered: Answered = said.heard
        flat = work.flat
        positions = None if answered.positions is None else self.off_wire(answered.positions, flat.device)
        values = self.off_wire(answered.values, flat.device)
        mean = (values if work.scale == 1 else values * work.scale).to(flat.dtype)
        if positions is None:
            flat.copy_(mean)
        else:
            flat.zero_()
            flat.index_copy_(0, positions, mean)
        chosen = torch.empty(0, dtype=torch.int64, device=flat.device)  # by who spoke too late, and learns the same
        if work.taken is not None:
            if work.taken.positions is None:
                return
            chosen = work.taken.positions[work.taken.num_fixed :]
        at = self._divisions[work.layout].free(answered)
        if at is None:
            assert positions is not None
            union, aggregate = positions[answered.num_fixed :], values[answered.num_fixed :]
        else:
            at = self.off_wire(at, flat.device)
            union = at if positions is None else positions.index_select(0, at)
            aggregate = values.index_select(0, at)
        self._num_pushed += chosen.numel()
        self._num_answered += union.numel()
        self.heard_(work, chosen, union, aggregate)

    def looks_itself(self, work: Work) -> bool:
        return self.replays and self.comes_from_gpu(work) and bool(self.plans.of(work).plan.windows)

    def _choose_on_gpu(self, work: Work, plan: FramePlan) -> tuple[Tensor, Tensor] | None:
        """As below, where a GPU is told of it once and then repeats it."""
        if plan not in self._on_gpu:
            self._recorder = self._recorder or Recorder(work.device)
            self._on_gpu[plan] = ChoiceOnGpu(plan, self._recorder)
        choice = self._on_gpu[plan]
        self.prepare_(work)
        due = work.account.due_(work.flat, 1 / work.scale)
        with self.clock.time("select", work.device):
            choice.take_(work, lambda: self.withdraw_(work, plan, due), *self.looked_at(work))
        found = choice.found(work)
        if found is None:
            return None
        told = _without_zeros(*found, plan.num_fixed)
        if told[0] is not found[0]:
            assert work.taken is not None and work.taken.positions is not None
            chosen, values = _without_zeros(work.taken.positions[plan.num_fixed :], work.taken.values, plan.num_fixed)
            work.taken = Taken(plan.positions(chosen), plan.num_fixed, values)
        return told

    def _choose(self, work: Work, plan: FramePlan) -> Generator[Message, Any, tuple[Tensor, Tensor] | None]:
        """What is told of the chosen entries and of the fixed ones, on the wire; None where it is not finite."""
        self.prepare_(work)
        choice = yield from self.take_(work)
        if choice is None:
            return None
        with self.clock.time("select", work.device):  # whose end waits for what goes to the wire
            chosen, values = _without_zeros(*choice, plan.num_fixed)
            work.taken = Taken(plan.positions(chosen.to(torch.int64)), plan.num_fixed, values)
            told = take_sides(values, plan.num_fixed, work.step) if self.server.votes else values
            return self.on_wire(chosen), self.on_wire(told)

    def prepare_(self, work: Work) -> None:
        """Find out what the step says about a choice, before a GPU is asked for it."""

    def looked_at(self, work: Work) -> Sequence[Tensor]:
        """What a choice looks at beside the bucket and its account."""
        return ()

    def take_(self, work: Work) -> Choosing:
        """Deposit the gradient and take out what is to be said; nothing where it is not finite."""
        yield from ()  # nothing to ask: every worker chooses for itself
        if not work.finite:
            return None
        with self.clock.time("select", work.device):
            return self.withdraw_(work, self.plans.of(work), work.account.due_(work.flat, 1 / work.scale))

    def withdraw_(self, work: Work, plan: FramePlan, due: Due) -> tuple[Tensor, Tensor]:
        """Choose among the entries, and take those out."""
        return plan.withdraw_(work.account.balance, due)

    def heard_(self, work: Work, chosen: Tensor, union: Tensor, aggregate: Tensor) -> None:
        """Learn from an answer: what was chosen, the entries of it that are chosen among, ascending, and its values."""

    def _answer(self, work: Work, parts: Mapping[int, Tensor]) -> Tensor | None:
        """What the owner of this worker's own share says to all parts of it."""
        if self.owner is None:
            return None
        with self.clock.time("decode", self.transport.wire or work.device):
            return self.owner.answer(parts, work.layout, **work.frame_id)

    def _division(self, layout: Layout, plan: FramePlan) -> Division:
        if layout not in self._divisions:
            wire = self.transport.wire or plan.fixed.device
            num_shares = self.transport.num_shares
            self._divisions[layout] = Division(layout, num_shares, plan, wire, self.quantize, votes=self.server.votes)
        return self._divisions[layout]

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        return {
            "passes": self.plans.passes(),
            "num_pushed": self._num_pushed,
            "num_answered": self._num_answered,
            "num_living": self.transport.num_living if self.owner is None else None,
            "held_bytes": self.owner.num_bytes if self.owner is not None else 0,
        }

    def state_dict(self) -> dict[str, Any]:
        """Under dedicated servers, a call that all workers make, and one gets what those keep."""
        if self.owner is not None:
            return {"owner": self.owner.state_dict()}
        kept = self.transport.owner_states()
        return {"servers": [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in kept if each]}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        if self.owner is None:
            self.transport.load_owner_states(_server_states(states, self.transport.num_shares))
        else:
            self.owner.load_state_dict(_owner_state(states, self.transport))


def _ties(num_voters: int) -> float:
    """The share of entries on which M random signs have no majority."""
    return 0.0 if num_voters % 2 else math.comb(num_voters, num_voters // 2) / 2.0**num_voters


def _without_zeros(chosen: Tensor, values: Tensor, num_fixed: int) -> tuple[Tensor, Tensor]:
    """The chosen entries that are worth a place: a zero merely filled up the k."""
    if not has_zeros(values[num_fixed:]):
        return chosen, values
    told = nonzero(values[num_fixed:])
    return chosen[told], torch.cat([values[:num_fixed], values[num_fixed:][told]])


def _server_states(states: Sequence[Mapping[str, Any]], num_servers: int) -> list[bytes]:
    """What each server kept, from the one worker's state that has it; nothing where none of these has."""
    found = [state["servers"] for state in states if state.get("servers")]
    if (found and len(found[0]) != num_servers) or any(state["owner"] for state in states):
        raise StateError("the state was saved with other servers; resume with as many as then")
    return [bytes(each.numpy()) for each in found[0]] if found else []


def _owner_state(states: Sequence[Mapping[str, Any]], transport: Transport) -> dict[str, Any]:
    """What this worker holds as an owner: what it held, or its piece of what all held where their number changed."""
    owners = [state["owner"] for state in states if state["owner"]]
    if not owners:
        if any(state.get("servers") for state in states):
            raise StateError("the state was saved under dedicated servers; resume with as many")
        return {"held": {}, "records": {}}
    if owners[0]["num_shares"] == transport.num_shares:
        mine = [state["owner"] for state in states if state["rank"] == transport.owned_share]
        return dict(mine[0]) if mine else {"held": {}, "records": {}}
    return {"held": _recut([owner["held"] for owner in owners], transport), "records": {}}


def _recut(held: Sequence[Mapping[str, Tensor]], transport: Transport) -> dict[str, Tensor]:
    """One share's piece of each parameter, from the pieces of all shares of another division."""
    pieces = {}
    share = transport.owned_share
    assert share is not None
    for name in held[0]:
        whole = torch.cat([one[name] for one in held])
        borders = piece_borders(whole.numel(), transport.num_shares)
        pieces[name] = whole[borders[share] : borders[share + 1]].clone()
    return pieces
