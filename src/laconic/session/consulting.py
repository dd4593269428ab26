"""The half of a session in which owners answer: each entry's owner hears of it from all workers and tells all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from laconic import kernels
from laconic.exchange import Server, Shares
from laconic.kernels.reference.nonzero import nonzero
from laconic.layout import Bucket, Layout
from laconic.memory import Account, Due, Ledger
from laconic.quantize import Marks, Quantizer, Trits
from laconic.select import Overlap
from laconic.server.owner import Owner
from laconic.server.vote import take_sides
from laconic.session.bucket_plan import BucketPlan
from laconic.session.past import Boost, Past
from laconic.session.summing import Summing
from laconic.transport import Answer
from laconic.wire import FrameShape, longest_frame


@dataclass
class Unions:
    """Sizes of unions and of what each worker sent to them, over all buckets and steps."""

    num_sent: int = 0
    num_answered: int = 0


@dataclass(frozen=True)
class _Sent:
    """What a worker took out of an account, and what its parts say of it; all in the bucket's order."""

    fixed: Tensor  # positions that go at every step
    chosen: Tensor  # and those of this step, ascending
    values: Tensor  # of both
    said: Tensor

    @property
    def positions(self) -> Tensor:
        return torch.cat([self.fixed, self.chosen])


class _Cut(NamedTuple):
    """A bucket divided among owners, with what never changes of it."""

    shares: Shares
    fixed_order: Tensor  # of the entries that go at every step, by share
    fixed: list[Tensor]  # those of each share
    is_fixed: Tensor  # for each entry of the bucket whether it is one of them
    longest: list[int]  # bytes that a frame about a share may take


class _Heard(NamedTuple):
    """What the answers say, one owner after the other."""

    positions: Tensor | None  # None: every entry, in order
    values: Tensor
    num_fixed: int  # of entries that go at every step and are told as such: they come first

    def free(self, cut: _Cut) -> Tensor:
        """Whether each is told of an entry that is chosen among; a dense answer also says where nothing is."""
        there = self.values != 0
        if self.positions is not None and self.num_fixed == cut.fixed_order.numel():
            there[: self.num_fixed] = False
            return there
        return there & ~(cut.is_fixed if self.positions is None else cut.is_fixed[self.positions])


class Consulting(Summing):
    """What a session needs to push_pull owners; Session sets it up and counts the steps."""

    _owner: Owner | None  # of this worker's own share
    _pasts: Ledger[Past] | None  # where a score looks at the past
    _unions: Unions
    _cuts: dict[Layout, _Cut]

    def _consult_(self, bucket: Bucket, plan: BucketPlan, density: float) -> None:
        """Deposit, choose, withdraw, send each owner its part; read the answers."""
        flat, device, wire = bucket.flat, bucket.flat.device, self.transport.wire or bucket.flat.device
        frame_id = {"step": self._step, "bucket": len(self._seen) - 1}
        account = self._ledger.open(bucket.layout, device)
        past = None if self._pasts is None else self._pasts.open(bucket.layout, device)
        if self._loss_scale is not None:
            self._undo_later(account)
            if past is not None:
                self._undo_later(past)
        cut = self._cut(bucket.layout, plan, wire)
        with self._held(account, bucket):
            with self._clock.time("select", device):
                finite = kernels.all_finite(flat)
                if finite:
                    chosen, values = self._choose(account, past, bucket, plan, density)
                elif self._leads_or_follows:
                    self._follow(plan, None)  # the others wait for it
            with self._clock.time("encode", device):
                if finite:
                    votes = take_sides(values, plan.fixed.numel(), self._step) if self._is_vote else values
                    parts, said = self._parts(plan, cut, chosen.to(wire), votes.to(wire), frame_id)
                    sent = _Sent(plan.fixed, chosen.to(torch.int64), values, said.to(device))
                else:
                    parts = _overflows(cut.shares, plan, wire, frame_id)
            with self._clock.time("exchange", device):
                self.transport.announce(bucket.layout, **frame_id)
                answer = self._own_answer(bucket.layout, **frame_id)
                answers = self.transport.push_pull(parts, answer, cut.longest)
            with self._clock.time("decode", device):
                heard = self._read(answers, cut, frame_id)
                if heard is None:
                    self._overflowed = True
                    if finite:
                        account.refund_(sent.positions, sent.values)  # nobody will apply it
                    flat.fill_(torch.nan)
                    return
                if self.scheme.memory.refunds:
                    account.refund_(sent.positions, sent.values - sent.said)
                account.sent_(sent.chosen, sent.said[sent.fixed.numel() :])
                self._apply_(flat, cut, sent, heard, past)

    def _cut(self, layout: Layout, plan: BucketPlan, wire: torch.device) -> _Cut:
        if layout not in self._cuts:
            shares, fixed = Shares(layout, self.transport.num_shares), plan.fixed.to(wire)
            order, places = shares.cut(fixed)
            by_share = torch.split(fixed[order], [place.numel() for place in places])
            is_fixed = torch.zeros(layout.num_entries, dtype=torch.bool, device=wire)
            is_fixed[fixed] = True
            longest = [longest_frame(own.num_entries, self._forms) for own in shares.layouts]
            self._cuts[layout] = _Cut(shares, order, list(by_share), is_fixed, longest)
        return self._cuts[layout]

    @property
    def _forms(self) -> list[Quantizer]:
        """How values may be written, up or down."""
        quantize = self.scheme.frame_answers[1]
        return [quantize, Trits()] if self._is_vote else [quantize]

    @property
    def _is_vote(self) -> bool:
        return isinstance(self.scheme.exchange, Server) and self.scheme.exchange.votes

    def _own_answer(self, layout: Layout, *, step: int, bucket: int) -> Answer | None:
        if self._owner is None:
            return None
        return partial(self._owner.answer, layout=layout, step=step, bucket=bucket)

    def _choose(
        self, account: Account, past: Past | None, bucket: Bucket, plan: BucketPlan, density: float
    ) -> tuple[Tensor, Tensor]:
        """Deposit the gradient; (chosen positions, values at the fixed ones and at those), without zeros."""
        select = self.scheme.select
        due = account.due_(bucket.flat, 1 / self._scale)
        if self._leads_or_follows:
            chosen, values = self._choose_alike(plan, account.balance, due)
        elif past is None or not isinstance(select, Overlap):
            chosen, values = plan.withdraw_(account.balance, due)
        else:
            turn = select.swept(bucket.layout, density, self._step, len(self._seen) - 1, bucket.flat.device)
            chosen, values = _withdraw_scored_(plan, account.balance, due, select, past, turn)
        num_fixed = plan.fixed.numel()
        told = nonzero(values[num_fixed:])
        if told.numel() == chosen.numel():
            return chosen, values
        return chosen[told], torch.cat([values[:num_fixed], values[num_fixed:][told]])

    @property
    def _leads_or_follows(self) -> bool:
        return isinstance(self.scheme.select, Overlap) and self.scheme.select.score == "leader"

    def _choose_alike(self, plan: BucketPlan, balance: Tensor, due: Due) -> tuple[Tensor, Tensor]:
        """Withdraw what worker (step mod M) would choose for itself; where it cannot say, everyone chooses."""
        if self.transport.rank == self._step % self.transport.num_workers:
            chosen, values = plan.withdraw_(balance, due)
            self._follow(plan, chosen[values[plan.fixed.numel() :] != 0])
            return chosen, values
        told = self._follow(plan, None)
        return plan.withdraw_(balance, due) if told is None else (told, plan.withdraw_at_(balance, due, told))

    def _follow(self, plan: BucketPlan, mine: Tensor | None) -> Tensor | None:
        """What the worker whose turn it is chose; `mine` where that is this one, None where it overflowed."""
        n, leader, wire = plan.plan.num_entries, self._step % self.transport.num_workers, self.transport.wire
        frame_id, frame = {"step": self._step, "bucket": len(self._seen) - 1}, None
        if mine is not None:
            codes, scale = Marks().encode(torch.empty(0, device=wire or mine.device))
            shape = FrameShape(n, mine.numel(), 0, Marks())
            frame = shape.write_smallest(mine.to(codes.device), codes, scale, **frame_id)
        heard = self.transport.broadcast(frame, leader)
        if not heard.numel():
            return None
        contents = FrameShape.of(heard, n, [Marks()], peer=leader).read(heard, **frame_id, peer=leader)
        return contents.positions.to(plan.fixed.device)

    def _parts(
        self, plan: BucketPlan, cut: _Cut, chosen: Tensor, values: Tensor, frame_id: dict[str, int]
    ) -> tuple[list[Tensor], Tensor]:
        """A frame for each owner, and what all of them together say, in the order of `values`."""
        num_fixed = plan.fixed.numel()
        shares, fixed_order = cut.shares, cut.fixed_order
        if shares.num_shares == 1:
            shape = _shape(shares, 0, chosen.numel(), num_fixed, plan)
            frame, said = _written(shape, chosen.to(torch.int32), values, frame_id)
            return [frame], said
        order, places = shares.cut(chosen)
        counts = [fixed.numel() for fixed in cut.fixed], [place.numel() for place in places]
        fixed_values = torch.split(values[:num_fixed][fixed_order], counts[0])
        chosen_values = torch.split(values[num_fixed:][order], counts[1])
        frames, whole, rest = [], [], []  # and what those say of fixed and chosen entries
        for p, (num_own, num_chosen) in enumerate(zip(*counts, strict=True)):
            own = torch.cat([fixed_values[p], chosen_values[p]])
            frame, decoded = _written(_shape(shares, p, num_chosen, num_own, plan), places[p], own, frame_id)
            frames.append(frame)
            whole.append(decoded[:num_own])
            rest.append(decoded[num_own:])
        said = torch.empty_like(values)
        said[:num_fixed][fixed_order] = torch.cat(whole)
        said[num_fixed:][order] = torch.cat(rest)
        return frames, said

    def _read(self, answers: Sequence[Tensor], cut: _Cut, frame_id: dict[str, int]) -> _Heard | None:
        """What all owners say; None if someone overflowed."""
        forms = self._forms
        fixed, places = [], []
        whole, chosen = [], []  # values at those
        for p, frame in enumerate(answers):
            n = cut.shares.layouts[p].num_entries
            shape = FrameShape.of(frame, n, forms, peer=p)
            contents = shape.read(frame, **frame_id, peer=p)
            if contents.overflow:
                return None
            fixed.append(cut.fixed[p][: shape.num_fixed])
            places.append(contents.positions)
            whole.append(contents.values[: shape.num_fixed])
            chosen.append(contents.values[shape.num_fixed :])
        values = torch.cat([*whole, *chosen])
        values = values.sign() if self._is_vote else values
        if len(answers) == 1 and values.numel() == n and shape.num_fixed in (0, n):
            return _Heard(None, values, 0)
        fixed_told = sum(told.numel() for told in whole)
        return _Heard(torch.cat([*fixed, cut.shares.positions(places)]), values, fixed_told)

    def _apply_(self, flat: Tensor, cut: _Cut, sent: _Sent, heard: _Heard, past: Past | None) -> None:
        """Overwrite the bucket with what the owners said, and learn from it."""
        told = (heard.values * self._scale).to(flat.device, flat.dtype)
        if heard.positions is None:
            flat.copy_(told)
        else:
            flat.zero_()
            flat.index_copy_(0, heard.positions.to(flat.device), told)
        if cut.fixed_order.numel() == flat.numel():
            return
        free, select = heard.free(cut), self.scheme.select
        self._unions.num_sent += sent.chosen.numel()
        at = nonzero(free)
        self._unions.num_answered += at.numel()
        if past is not None and isinstance(select, Overlap):
            union = at if heard.positions is None else heard.positions.index_select(0, at)
            past.note_(select.scored, union.to(flat.device), heard.values.index_select(0, at).to(flat.device))
            past.sent_(sent.chosen, self._step)


def _withdraw_scored_(
    plan: BucketPlan, balance: Tensor, due: Due, select: Overlap, past: Past, turn: Tensor
) -> tuple[Tensor, Tensor]:
    """Take out the entries whose turn it is, then those with the largest scores.

    What was swept just now is not chosen again, unless as a zero.
    """
    owed = due.at(turn)
    swept = balance.index_select(0, turn).add_(owed)
    balance.index_copy_(0, turn, -owed)  # the addition leaves zeros, which have no score and are not chosen
    boost = Boost(select, plan.plan, past, balance, due)
    chosen, values = plan.withdraw_(balance, due)
    whole, values = values.tensor_split([plan.fixed.numel()])
    values = boost.take_back_(chosen, values)
    chosen, order = torch.cat([turn.to(torch.int32), chosen]).sort()
    return chosen, torch.cat([whole, torch.cat([swept, values]).index_select(0, order)])


def _written(shape: FrameShape, places: Tensor, values: Tensor, frame_id: dict[str, int]) -> tuple[Tensor, Tensor]:
    """A frame of these values, and what it says of them."""
    codes, scale = shape.quantize.encode(values)
    frame = shape.write_smallest(places, codes, scale, **frame_id)
    return frame, shape.quantize.decode(codes, scale)[: values.numel()]


def _shape(shares: Shares, share: int, k: int, num_fixed: int, plan: BucketPlan) -> FrameShape:
    return FrameShape(shares.layouts[share].num_entries, k, num_fixed, plan.shape.quantize)


def _overflows(shares: Shares, plan: BucketPlan, wire: torch.device, frame_id: dict[str, int]) -> list[Tensor]:
    """What tells each owner that this worker has nothing finite to say."""
    return [_shape(shares, p, 0, 0, plan).write_overflow(wire, **frame_id) for p in range(shares.num_shares)]
