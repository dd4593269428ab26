"""A bucket divided among the owners of its entries: the part that each is told, and what all of them answered."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.exchange import Shares, piece_borders
from laconic.kernels import Pieces, has_zeros, nonzero
from laconic.layout import Layout
from laconic.paths.frame_plan import FramePlan
from laconic.paths.path import Work
from laconic.quantize import Quantizer, Trits
from laconic.wire import FrameShape, longest_frame, read_answers, read_each, write_each, write_parts


@dataclass(frozen=True)
class Answered:
    """What the answers say."""

    positions: Tensor | None  # int64, ascending but for the fixed; None: every entry, in order
    values: Tensor
    num_fixed: int  # of entries that go at every step and are told as such: they come first


class Division:
    """What never changes of it: which entries go at every step, and whose they are."""

    def __init__(
        self, layout: Layout, num_shares: int, plan: FramePlan, wire: torch.device, quantize: Quantizer, *, votes: bool
    ) -> None:
        self._shares = Shares(layout, num_shares)
        self._quantize = quantize
        self._votes = votes
        self._forms = [quantize, Trits()] if votes else [quantize]  # of values, up or down
        self._sizes = [own.num_entries for own in self._shares.layouts]
        fixed = plan.fixed.to(wire)
        self._fixed_order, places = self._shares.cut(fixed)
        self._num_fixed = [place.numel() for place in places]
        self._fixed = torch.split(fixed[self._fixed_order], self._num_fixed)
        self._is_fixed = torch.zeros(layout.num_entries, dtype=torch.bool, device=wire)
        self._is_fixed[fixed] = True
        self._pieces: Pieces | None = None  # where all frames are written, and read, at once
        if wire.type == "cpu" and quantize.code_dtype == torch.bfloat16:
            cuts = [piece_borders(span.num_entries, num_shares) for span in plan.plan.fixed]
            lengths = torch.tensor(cuts, dtype=torch.int64).view(-1, num_shares + 1).diff()
            self._pieces = Pieces(*self._shares.pieces(wire), lengths)
        self.longest = [longest_frame(n, self._forms) for n in self._sizes]  # bytes that a frame about a share may take

    def overflows(self, work: Work, wire: torch.device) -> list[Tensor]:
        """Parts that only say that this worker saw Inf or NaN."""
        shapes = [FrameShape(n, 0, 0, self._quantize) for n in self._sizes]
        return [shape.write_overflow(wire, **work.frame_id) for shape in shapes]

    def parts(self, work: Work, chosen: Tensor, values: Tensor) -> tuple[list[Tensor], Tensor]:
        """A frame for each owner of fixed and chosen values, and what all of them together say, in that order."""
        if self._pieces is not None:
            sizes = zip(self._sizes, self._num_fixed, strict=True)
            shapes = [FrameShape(n, 0, fixed, self._quantize) for n, fixed in sizes]
            sent = torch.empty(values.shape, dtype=values.dtype, pin_memory=work.device.type == "cuda")
            at_once = write_parts(shapes, chosen.to(torch.int32), values, self._pieces, sent, **work.frame_id)
            if at_once is not None:
                return at_once, sent
        order, places = self._shares.cut(chosen)
        counts = [place.numel() for place in places]
        num_fixed = self._fixed_order.numel()
        whole, rest = values.tensor_split([num_fixed])
        fixed_values = torch.split(whole.index_select(0, self._fixed_order), self._num_fixed)
        chosen_values = torch.split(rest.index_select(0, order), counts)
        shapes = [FrameShape(*each, self._quantize) for each in zip(self._sizes, counts, self._num_fixed, strict=True)]
        told = [torch.cat(both) for both in zip(fixed_values, chosen_values, strict=True)]
        frames, said = zip(*write_each(shapes, places, told, **work.frame_id), strict=True)
        halves = [each.tensor_split([fixed]) for each, fixed in zip(said, self._num_fixed, strict=True)]
        sent = torch.empty_like(values)
        sent[:num_fixed].index_copy_(0, self._fixed_order, torch.cat([fixed for fixed, _ in halves]))
        sent[num_fixed:].index_copy_(0, order, torch.cat([rest for _, rest in halves]))
        return list(frames), sent

    def read(self, work: Work, answers: Sequence[Tensor]) -> Answered | None:
        """What all owners say; None if someone overflowed."""
        shapes = [FrameShape.of(frame, self._sizes[p], self._forms, peer=p) for p, frame in enumerate(answers)]
        if self._pieces is not None and [shape.num_fixed for shape in shapes] == self._num_fixed:
            at_once = self._read_at_once(work, answers, shapes, self._pieces)
            if at_once is not None:
                return at_once
        fixed = []
        places = []
        fixed_values = []
        chosen_values = []
        heard = read_each(dict(enumerate(answers)), shapes, **work.frame_id)
        for (p, contents), shape in zip(heard.items(), shapes, strict=True):
            if contents.overflow:
                return None
            is_dense = shape.k == shape.num_entries
            num_fixed = 0 if self._votes or is_dense else self._num_fixed[p]
            if shape.num_fixed != num_fixed:
                raise FrameError(f"owner {p} sent {shape.num_fixed} fixed entries, not {num_fixed}; use the same model")
            fixed.append(self._fixed[p][:num_fixed])
            places.append(contents.positions)
            fixed_values.append(contents.values[: shape.num_fixed])
            chosen_values.append(contents.values[shape.num_fixed :])
        positions, chosen = self._shares.joined(places, chosen_values)
        values = torch.cat([*fixed_values, chosen])
        values = values.sign() if self._votes else values
        num_entries = work.layout.num_entries
        if len(answers) == 1 and values.numel() == num_entries and fixed[0].numel() in (0, num_entries):
            return Answered(None, values, 0)
        return Answered(torch.cat([*fixed, positions]), values, sum(told.numel() for told in fixed))

    def _read_at_once(
        self, work: Work, answers: Sequence[Tensor], shapes: Sequence[FrameShape], pieces: Pieces
    ) -> Answered | None:
        """The same, where all answers tell their fixed entries and some others; None where one does not."""
        num_fixed = self._fixed_order.numel()
        total = num_fixed + sum(shape.k for shape in shapes)
        goes_on = work.device.type == "cuda"  # to there
        positions = torch.empty(total, dtype=torch.int64, pin_memory=goes_on)
        values = torch.empty(total, dtype=torch.float32, pin_memory=goes_on)
        torch.cat(self._fixed, out=positions[:num_fixed])
        if not read_answers(answers, shapes, pieces, positions[num_fixed:], values, **work.frame_id):
            return None
        return Answered(positions, values, num_fixed)

    def free(self, answered: Answered) -> Tensor | None:
        """Which values are told of entries that are chosen among, ascending; None: all that are not told as fixed.

        A dense answer also says where nothing is.
        """
        positions, values = answered.positions, answered.values
        tells_fixed = positions is not None and answered.num_fixed == self._fixed_order.numel()
        if tells_fixed and not has_zeros(values[answered.num_fixed :]):
            return None
        there = values != 0
        if tells_fixed:
            there[: answered.num_fixed] = False
            return nonzero(there)
        return nonzero(there & ~(self._is_fixed if positions is None else self._is_fixed[positions]))
