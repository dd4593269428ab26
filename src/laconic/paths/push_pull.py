"""Each entry's owner receives it from all workers and answers all of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.exchange import Server, Shares, piece_borders
from laconic.kernels import Executor, Pieces, has_zeros, nonzero, to_device
from laconic.layout import Layout
from laconic.memory import Account, Due, Ledger
from laconic.paths.frames import FramePlan, FramePlans
from laconic.paths.path import Messages, Path, Withdrawn, Work
from laconic.quantize import Quantizer, Trits
from laconic.server import Owner, owner_state, server_states
from laconic.server.vote import take_sides
from laconic.transport import Push
from laconic.wire import Contents, FrameShape, longest_frame, read_answers, read_each, write_each, write_parts

_LENGTH_BYTES = 8  # before each message between workers that own shares


@dataclass
class PushPull(Path):
    """Deposit, select, withdraw, push each owner its part; pull the answers.

    Owners are the workers themselves, each of a share of every bucket, or servers.
    """

    plans: FramePlans
    server: Server
    quantize: Quantizer
    owner: Owner | None  # of this worker's own share, where workers own
    ledger: Ledger[Account]
    executor: Executor
    asks_host: bool  # while it selects, so that this cannot be captured

    def __post_init__(self) -> None:
        self._votes = self.server.votes
        self._divisions: dict[Layout, _Division] = {}
        self.num_pushed = 0  # of the entries that are selected among
        self.num_answered = 0

    @property
    def message_offsets(self) -> Sequence[int]:
        """Parts, then answers."""
        return 0, self.transport.pull_delay

    def bytes_out(self, layout: Layout) -> int:
        up, down = self.up_and_down(layout)
        num_workers = self.transport.num_workers
        others = num_workers - 1
        return up * others // num_workers + down * others // num_workers + 2 * _LENGTH_BYTES * others

    def up_and_down(self, layout: Layout) -> tuple[int, int]:
        """Bytes that the parts of one worker and the answers of all owners come to, one copy of each.

        The sizes of parts and unions depend on what is selected. This is for workers that select independently and
        evenly, |U| = N*(1 - (1 - rho)^M): selections that have something in common come to less.
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
            if self._votes:
                decided = union + math.ceil(fixed * (1 - _ties(num_workers)))
                forms = [FrameShape(n, decided, 0, quantize), FrameShape(n, n, 0, Trits())]
            down += min(form.num_bytes for form in forms)
        return up, down

    def captures(self, work: Work) -> bool:
        on_gpu = self.executor.captures(work.flat, self.transport.wire)
        return on_gpu and not self.asks_host and bool(self.plans.of(work).plan.windows)

    def exchange(self, work: Work) -> Messages:
        plan = self.plans.of(work)
        place = self._place_of_frames(plan)
        division = self._division(work.layout, plan, place)
        pushed = self._select(work, plan, place) if work.finite else None
        with self.clock.time("encode", work.device):
            if pushed is not None:
                parts, sent = division.parts(work, *pushed)
                work.note_sent(to_device(sent, work.device))
            else:
                parts = division.overflows(work)
            parts = [self.on_wire(part) for part in parts]
        push = Push(work.layout, work.step, work.number, parts, division.longest)
        received = yield partial(self.transport.push, push)
        own = self._answer(work, received, place)
        answers = yield partial(self.transport.pull, push, own)
        with self.clock.time("decode", work.device):
            return division.read(work, [to_device(answer, place) for answer in answers])

    def _place_of_frames(self, plan: FramePlan) -> torch.device:
        """Where frames are written and read: on a GPU where every entry goes, which otherwise crosses to the host."""
        sends_all = plan.num_fixed == plan.plan.num_entries
        return plan.device if sends_all or self.transport.wire is None else self.transport.wire

    def _select(self, work: Work, plan: FramePlan, place: torch.device) -> tuple[Tensor, Tensor] | None:
        """(selected positions, fixed and selected values) where frames are written; None where not finite."""
        captures = self.captures(work)
        step = self.executor.step("select", plan, work.device, place, captures=captures)
        uses: list[Tensor | float] = [work.flat, work.account.balance, work.scale, *self.uses(work)]
        with self.clock.time("select", work.device):  # whose end waits for what goes to the wire
            body = partial(self._withdraw, work, plan, captures)
            work.withdrawn, (selected, values, *flags) = step.run(body, uses, *self.inputs(work))
        if any(map(bool, flags)):
            return None
        if has_zeros(values[plan.num_fixed :]):  # each merely filled up the k, and is not worth its place
            positions = work.withdrawn.positions
            assert positions is not None
            of_all = _without_zeros(positions[plan.num_fixed :], work.withdrawn.values, plan.num_fixed)
            work.withdrawn = Withdrawn(plan.positions(of_all[0]), plan.num_fixed, of_all[1])
            selected, values = _without_zeros(selected, values, plan.num_fixed)
        return selected, take_sides(values, plan.num_fixed, work.step) if self._votes else values

    def _withdraw(self, work: Work, plan: FramePlan, captures: bool, *inputs: Tensor) -> tuple[Withdrawn, list[Tensor]]:
        """What goes out, on the device, and its selected positions and all values for the wire."""
        flags = [work.flag_nonfinite_()] if captures else []
        due = work.account.due_(work.flat, 1 / work.scale)
        selected, values = self.withdraw_(work, plan, due, *inputs)
        return Withdrawn(plan.positions(selected.to(torch.int64)), plan.num_fixed, values), [selected, values, *flags]

    def inputs(self, work: Work) -> Sequence[Tensor]:
        """What the host adds to a selection."""
        return ()

    def uses(self, work: Work) -> Sequence[Tensor]:
        """What a selection looks at beside the bucket and its account."""
        return ()

    def withdraw_(self, work: Work, plan: FramePlan, due: Due, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Select among the entries, and take those out."""
        return plan.withdraw_(work.account.balance, due)

    def learn_(self, work: Work, selected: Tensor, union: Tensor, aggregate: Tensor) -> None:
        """Learn from an answer: what was selected, its entries that are selected among, ascending, and its values."""

    def apply_(self, work: Work, received: "_Answers") -> None:
        """Overwrite the bucket with what the owners answered, and learn from it."""
        flat = work.flat
        positions = None if received.positions is None else to_device(received.positions, flat.device)
        values = to_device(received.values, flat.device)
        mean = (values if work.scale == 1 else values * work.scale).to(flat.dtype)
        if positions is None:
            flat.copy_(mean)
        else:
            flat.zero_()
            flat.index_copy_(0, positions, mean)
        selected = torch.empty(0, dtype=torch.int64, device=flat.device)  # by a late worker, which learns the same
        if work.withdrawn is not None and not work.bucket.was_late:
            if work.withdrawn.positions is None:
                return
            selected = work.withdrawn.positions[work.withdrawn.num_fixed :]
        at = self._divisions[work.layout].selectable(received)
        if at is None:
            assert positions is not None
            union, aggregate = positions[received.num_fixed :], values[received.num_fixed :]
        else:
            at = to_device(at, flat.device)
            union = at if positions is None else positions.index_select(0, at)
            aggregate = values.index_select(0, at)
        self.num_pushed += selected.numel()
        self.num_answered += union.numel()
        self.learn_(work, selected, union, aggregate)

    def _answer(self, work: Work, parts: Mapping[int, Tensor], place: torch.device) -> Tensor | None:
        """The answer of this worker's own share to all parts of it."""
        if self.owner is None:
            return None
        with self.clock.time("decode", place):
            frames = {rank: to_device(part, place) for rank, part in parts.items()}
            return self.on_wire(self.owner.answer(frames, work.layout, **work.frame_id))

    def _division(self, layout: Layout, plan: FramePlan, place: torch.device) -> "_Division":
        if layout not in self._divisions:
            num_shares = self.transport.num_shares
            self._divisions[layout] = _Division(layout, num_shares, plan, place, self.quantize, votes=self._votes)
        return self._divisions[layout]

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        return {
            "passes": self.plans.passes(),
            "num_pushed": self.num_pushed,
            "num_answered": self.num_answered,
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
            self.transport.load_owner_states(server_states(states, self.transport.num_shares))
        else:
            self.owner.load_state_dict(owner_state(states, self.owner.share, self.owner.num_shares))


def _ties(num_voters: int) -> float:
    """The share of entries on which M random signs have no majority."""
    return 0.0 if num_voters % 2 else math.comb(num_voters, num_voters // 2) / 2.0**num_voters


def _without_zeros(selected: Tensor, values: Tensor, num_fixed: int) -> tuple[Tensor, Tensor]:
    """The fixed entries, and the selected ones that are not zero."""
    at = nonzero(values[num_fixed:])
    return selected[at], torch.cat([values[:num_fixed], values[num_fixed:][at]])


@dataclass(frozen=True)
class _Answers:
    """What the owners answered, together."""

    positions: Tensor | None  # int64, ascending but for the fixed; None: every entry, in order
    values: Tensor
    num_fixed: int  # of entries that go at every step and are answered as such: they come first


class _Division:
    """A bucket divided among the owners of its entries: which go at every step, and whose each is."""

    def __init__(
        self, layout: Layout, num_shares: int, plan: FramePlan, place: torch.device, quantize: Quantizer, *, votes: bool
    ) -> None:
        self._shares = Shares(layout, num_shares)
        self._plan = plan
        self._place = place  # of its frames
        self._quantize = quantize
        self._votes = votes
        self._forms = [quantize, Trits()] if votes else [quantize]  # of values, up or down
        self._sizes = [own.num_entries for own in self._shares.layouts]
        names = {span.name for span in plan.plan.fixed}
        of_shares = [[span for span in own.spans if span.name in names] for own in self._shares.layouts]
        self._num_fixed = [sum(span.num_entries for span in spans) for spans in of_shares]
        self._pieces: Pieces | None = None  # for all frames to be written, and read, in one call
        if place.type == "cpu" and quantize.code_dtype == torch.bfloat16:
            cuts = [piece_borders(span.num_entries, num_shares) for span in plan.plan.fixed]
            lengths = torch.tensor(cuts, dtype=torch.int64).view(-1, num_shares + 1).diff()
            self._pieces = Pieces(*self._shares.pieces(place), lengths)
        self.longest = [longest_frame(n, self._forms) for n in self._sizes]  # bytes that a frame about a share may take

    @cached_property
    def _all_fixed(self) -> Tensor:
        """The entries that go at every step."""
        return self._plan.fixed.to(self._place)

    @cached_property
    def _fixed_order(self) -> Tensor:
        """Their order by share."""
        return self._shares.cut(self._all_fixed)[0]

    @cached_property
    def _fixed(self) -> list[Tensor]:
        """Those of each share."""
        return list(torch.split(self._all_fixed[self._fixed_order], self._num_fixed))

    @cached_property
    def _is_fixed(self) -> Tensor:
        is_fixed = torch.zeros(sum(self._sizes), dtype=torch.bool, device=self._place)
        return is_fixed.index_fill_(0, self._all_fixed, True)

    def overflows(self, work: Work) -> list[Tensor]:
        """Parts that only say that this worker saw Inf or NaN."""
        shapes = [FrameShape(n, 0, 0, self._quantize) for n in self._sizes]
        return [shape.write_overflow(self._place, **work.frame_id) for shape in shapes]

    def parts(self, work: Work, selected: Tensor, values: Tensor) -> tuple[list[Tensor], Tensor]:
        """A frame for each owner of fixed and selected values, and those values as the frames say them."""
        if self._pieces is not None:
            sizes = zip(self._sizes, self._num_fixed, strict=True)
            shapes = [FrameShape(n, 0, fixed, self._quantize) for n, fixed in sizes]
            sent = torch.empty(values.shape, dtype=values.dtype, pin_memory=work.device.type == "cuda")
            at_once = write_parts(shapes, selected.to(torch.int32), values, self._pieces, sent, **work.frame_id)
            if at_once is not None:
                return at_once, sent
        if self._num_fixed == self._sizes:  # by pieces: to look up every entry takes three times as long
            shapes = [FrameShape(n, 0, n, self._quantize) for n in self._sizes]
            nowhere = [selected.to(torch.int32)] * len(shapes)
            written = write_each(shapes, nowhere, self._shares.split(values), **work.frame_id)
            return [frame for frame, _ in written], self._shares.unsplit([sent for _, sent in written])
        order, places = self._shares.cut(selected)
        counts = [place.numel() for place in places]
        num_fixed = self._plan.num_fixed
        whole, rest = values.tensor_split([num_fixed])
        fixed_values = torch.split(whole.index_select(0, self._fixed_order), self._num_fixed)
        selected_values = torch.split(rest.index_select(0, order), counts)
        shapes = [FrameShape(*each, self._quantize) for each in zip(self._sizes, counts, self._num_fixed, strict=True)]
        by_share = [torch.cat(both) for both in zip(fixed_values, selected_values, strict=True)]
        frames, sent_by_share = zip(*write_each(shapes, places, by_share, **work.frame_id), strict=True)
        halves = [each.tensor_split([fixed]) for each, fixed in zip(sent_by_share, self._num_fixed, strict=True)]
        sent = torch.empty_like(values)
        sent[:num_fixed].index_copy_(0, self._fixed_order, torch.cat([fixed for fixed, _ in halves]))
        sent[num_fixed:].index_copy_(0, order, torch.cat([rest for _, rest in halves]))
        return list(frames), sent

    def read(self, work: Work, answers: Sequence[Tensor]) -> _Answers | None:
        """What all owners answered; None if someone overflowed."""
        shapes = [FrameShape.of(frame, self._sizes[p], self._forms, peer=p) for p, frame in enumerate(answers)]
        if self._pieces is not None and [shape.num_fixed for shape in shapes] == self._num_fixed:
            at_once = self._read_at_once(work, answers, shapes, self._pieces)
            if at_once is not None:
                return at_once
        fixed = []
        places = []
        fixed_values = []
        selected_values = []
        frames = read_each(dict(enumerate(answers)), shapes, **work.frame_id)
        if all(n in (shape.k, shape.num_fixed) for n, shape in zip(self._sizes, shapes, strict=True)):
            return self._read_whole(frames)
        for (p, contents), shape in zip(frames.items(), shapes, strict=True):
            if contents.overflow:
                return None
            is_dense = shape.k == shape.num_entries
            num_fixed = 0 if self._votes or is_dense else self._num_fixed[p]
            if shape.num_fixed != num_fixed:
                raise FrameError(f"owner {p} sent {shape.num_fixed} fixed entries, not {num_fixed}; use the same model")
            fixed.append(self._fixed[p][:num_fixed])
            places.append(contents.positions)
            fixed_values.append(contents.values[: shape.num_fixed])
            selected_values.append(contents.values[shape.num_fixed :])
        positions, selected = self._shares.joined(places, selected_values)
        values = torch.cat([*fixed_values, selected])
        values = values.sign() if self._votes else values
        return _Answers(torch.cat([*fixed, positions]), values, sum(each.numel() for each in fixed))

    def _read_whole(self, frames: Mapping[int, Contents]) -> _Answers | None:
        """The same, where all answers hold every entry."""
        if any(contents.overflow for contents in frames.values()):
            return None
        values = self._shares.unsplit([contents.values for contents in frames.values()])
        return _Answers(None, values.sign() if self._votes else values, 0)

    def _read_at_once(
        self, work: Work, answers: Sequence[Tensor], shapes: Sequence[FrameShape], pieces: Pieces
    ) -> _Answers | None:
        """The same, where all answers hold their fixed entries and some others; None where one does not."""
        num_fixed = self._plan.num_fixed
        total = num_fixed + sum(shape.k for shape in shapes)
        pinned = work.device.type == "cuda"  # where they go next
        positions = torch.empty(total, dtype=torch.int64, pin_memory=pinned)
        values = torch.empty(total, dtype=torch.float32, pin_memory=pinned)
        torch.cat(self._fixed, out=positions[:num_fixed])
        if not read_answers(answers, shapes, pieces, positions[num_fixed:], values, **work.frame_id):
            return None
        return _Answers(positions, values, num_fixed)

    def selectable(self, answers: _Answers) -> Tensor | None:
        """Which values are of entries that are selected among, ascending; None: all that are not among the fixed.

        A dense answer also says where nothing is.
        """
        positions, values = answers.positions, answers.values
        has_fixed = positions is not None and answers.num_fixed == self._plan.num_fixed
        if has_fixed and not has_zeros(values[answers.num_fixed :]):
            return None
        is_selectable = values != 0
        if has_fixed:
            is_selectable[: answers.num_fixed] = False
            return nonzero(is_selectable)
        return nonzero(is_selectable & ~(self._is_fixed if positions is None else self._is_fixed[positions]))
