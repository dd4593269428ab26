"""Each entry's owner hears of it from all workers and answers all of them."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.errors import FrameError, StateError
from laconic.exchange import Server, Shares, piece_borders
from laconic.kernels.reference.nonzero import nonzero
from laconic.layout import Layout
from laconic.memory import Account, Due, Ledger
from laconic.paths.frame_plan import FramePlan, FramePlans
from laconic.paths.path import Message, Path, Said, Speech, Taken, Work
from laconic.quantize import Quantizer, Trits
from laconic.server import Owner
from laconic.server.vote import take_sides
from laconic.transport import Answer, Push, Transport
from laconic.wire import FrameShape, longest_frame

# What is chosen: (positions, fixed and chosen values), or None where the gradient is not finite.
Choosing = Generator[Message, Any, tuple[Tensor, Tensor] | None]

_LENGTH_BYTES = 8  # before each message between workers that own shares


@dataclass(frozen=True)
class _Division:
    """A bucket divided among owners, with what never changes of it."""

    shares: Shares
    fixed_order: Tensor  # of the entries that go at every step, by share
    fixed: Sequence[Tensor]  # those of each share
    is_fixed: Tensor  # for each entry of the bucket whether it is one of them
    longest: Sequence[int]  # bytes that a frame about a share may take


@dataclass(frozen=True)
class _Answered:
    """What the answers say."""

    positions: Tensor | None  # int64, ascending but for the fixed; None: every entry, in order
    values: Tensor
    num_fixed: int  # of entries that go at every step and are told as such: they come first

    def free(self, division: _Division) -> Tensor | None:
        """Which are told of entries that are chosen among, ascending; None: all that are not told as fixed.

        A dense answer also says where nothing is.
        """
        there = self.values != 0
        if self.positions is not None and self.num_fixed == division.fixed_order.numel():
            if bool(there[self.num_fixed :].all()):
                return None
            there[: self.num_fixed] = False
            return nonzero(there)
        return nonzero(there & ~(division.is_fixed if self.positions is None else division.is_fixed[self.positions]))


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

    def __post_init__(self) -> None:
        self._forms = [self.quantize, Trits()] if self.server.votes else [self.quantize]  # of values, up or down
        self._divisions: dict[Layout, _Division] = {}
        self._num_pushed = 0
        self._num_answered = 0

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
        wire = self.transport.wire or work.device
        sent = None
        choice = yield from self.take_(work)
        if choice is not None:
            with self.clock.time("select", work.device):  # whose end waits for what goes to the wire
                chosen, values = _without_zeros(*choice, plan.num_fixed)
                work.taken = Taken(plan.positions(chosen.to(torch.int64)), plan.num_fixed, values)
                told = take_sides(values, plan.num_fixed, work.step) if self.server.votes else values
                chosen, told = self.on_wire(chosen), self.on_wire(told)
            with self.clock.time("encode", work.device):
                parts, sent = self._parts(work, division, plan, chosen, told)
                sent = self.off_wire(sent, work.device)
        else:
            shapes = [FrameShape(own.num_entries, 0, 0, self.quantize) for own in division.shares.layouts]
            parts = [shape.write_overflow(wire, **work.frame_id) for shape in shapes]
        push = Push(work.layout, work.step, work.number, parts, self._answer(work), division.longest)
        answers = yield partial(self.transport.push_pull, push)
        with self.clock.time("decode", work.device):
            answered = self._read(work, division, answers)
        return Said(answered, sent) if answered is not None else None

    def apply_(self, work: Work, said: Said) -> None:
        """Overwrite the bucket with what the owners said, and learn from it."""
        answered: _Answered = said.heard
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
        at = answered.free(self._divisions[work.layout])
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

    def _answer(self, work: Work) -> Answer | None:
        """What the owner of this worker's own share says to all parts, as they arrive."""
        if self.owner is None:
            return None
        return partial(self.owner.answer, layout=work.layout, step=work.step, bucket=work.number)

    def _division(self, layout: Layout, plan: FramePlan) -> _Division:
        if layout not in self._divisions:
            shares = Shares(layout, self.transport.num_shares)
            fixed = plan.fixed.to(self.transport.wire or plan.fixed.device)
            order, places = shares.cut(fixed)
            by_share = torch.split(fixed[order], [place.numel() for place in places])
            is_fixed = torch.zeros(layout.num_entries, dtype=torch.bool, device=fixed.device)
            is_fixed[fixed] = True
            longest = [longest_frame(own.num_entries, self._forms) for own in shares.layouts]
            self._divisions[layout] = _Division(shares, order, by_share, is_fixed, longest)
        return self._divisions[layout]

    def _parts(
        self, work: Work, division: _Division, plan: FramePlan, chosen: Tensor, values: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """A frame for each owner, and what all of them together say, in the order of `values`."""
        shares = division.shares
        if shares.num_shares == 1:
            frame, sent = self._written(work, shares.layouts[0], plan.num_fixed, chosen.to(torch.int32), values)
            return [frame], sent
        order, places = shares.cut(chosen)
        num_fixed = [fixed.numel() for fixed in division.fixed]
        whole, rest = values.tensor_split([plan.num_fixed])
        fixed_values = torch.split(whole.index_select(0, division.fixed_order), num_fixed)
        chosen_values = torch.split(rest.index_select(0, order), [place.numel() for place in places])
        frames = []
        fixed_sent = []
        chosen_sent = []
        for p, own in enumerate(shares.layouts):
            said = torch.cat([fixed_values[p], chosen_values[p]])
            frame, decoded = self._written(work, own, num_fixed[p], places[p], said)
            frames.append(frame)
            fixed_sent.append(decoded[: num_fixed[p]])
            chosen_sent.append(decoded[num_fixed[p] :])
        sent = torch.empty_like(values)
        sent[: plan.num_fixed].index_copy_(0, division.fixed_order, torch.cat(fixed_sent))
        sent[plan.num_fixed :].index_copy_(0, order, torch.cat(chosen_sent))
        return frames, sent

    def _written(
        self, work: Work, own: Layout, num_fixed: int, places: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A frame of these values of a share, and what it says of them."""
        codes, scale = self.quantize.encode(values)
        shape = FrameShape(own.num_entries, places.numel(), num_fixed, self.quantize)
        frame = shape.write_smallest(places, codes, scale, **work.frame_id)
        return frame, self.quantize.decode(codes, scale)[: values.numel()]

    def _read(self, work: Work, division: _Division, answers: Sequence[Tensor]) -> _Answered | None:
        """What all owners say; None if someone overflowed."""
        fixed = []
        places = []
        fixed_values = []
        chosen_values = []
        for p, frame in enumerate(answers):
            shape = FrameShape.of(frame, division.shares.layouts[p].num_entries, self._forms, peer=p)
            contents = shape.read(frame, **work.frame_id, peer=p)
            if contents.overflow:
                return None
            is_dense = shape.k == shape.num_entries
            num_fixed = 0 if self.server.votes or is_dense else division.fixed[p].numel()
            if shape.num_fixed != num_fixed:
                raise FrameError(f"owner {p} sent {shape.num_fixed} fixed entries, not {num_fixed}; use the same model")
            fixed.append(division.fixed[p][:num_fixed])
            places.append(contents.positions)
            fixed_values.append(contents.values[: shape.num_fixed])
            chosen_values.append(contents.values[shape.num_fixed :])
        positions, chosen = division.shares.joined(places, chosen_values)
        values = torch.cat([*fixed_values, chosen])
        values = values.sign() if self.server.votes else values
        num_entries = work.layout.num_entries
        if len(answers) == 1 and values.numel() == num_entries and fixed[0].numel() in (0, num_entries):
            return _Answered(None, values, 0)
        return _Answered(torch.cat([*fixed, positions]), values, sum(told.numel() for told in fixed))

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
    told = nonzero(values[num_fixed:])
    if told.numel() == chosen.numel():
        return chosen, values
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
