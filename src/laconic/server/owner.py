"""The owner of a share: adds up what the workers send of it, or takes their vote, and answers in the smallest form."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.exchange import Shares
from laconic.kernels.reference.nonzero import nonzero
from laconic.layout import Layout, Span, positions_of
from laconic.memory import Ledger, Residual
from laconic.memory.undo import SetAside, Undo
from laconic.quantize import Sign, Trits
from laconic.scheme import Scheme
from laconic.server.vote import Vote
from laconic.wire import Contents, FrameShape


@dataclass
class Owner:
    """Answers for one share of every bucket, and holds what its answers leave out: sums over workers, by parameter.

    held += what was heard ; answer(held[U] / M) ; held[U] -= M * what the answer says

    Where nothing is left out, `held` is zero between steps. `undoes` is for steps that a GradScaler may skip whole,
    `holds_idle` for models of which a step may leave parameters out: DDP then drops what is said of those.
    """

    scheme: Scheme
    share: int
    num_shares: int
    undoes: bool = False
    holds_idle: bool = False

    def __post_init__(self) -> None:
        self._server = self.scheme.server
        self._quantize = self.scheme.frame_code
        self._held = Ledger(Residual())
        self._cuts: dict[Layout, tuple[Layout, Tensor]] = {}
        self._searches: dict[tuple[Layout, Span], Tensor] = {}  # by share and window
        self._vote = Vote(weighted=self._server.combine == "weighted")
        self._undo = Undo()
        self._step = -1
        self._overflowed = False  # in some bucket of this step

    @property
    def num_bytes(self) -> int:
        """What it holds, at most its share of the model as float32."""
        return self._held.num_bytes if self.scheme.holds else 0

    def read(self, frame: Tensor, layout: Layout, *, step: int, bucket: int, peer: int) -> Contents:
        """What one worker says of this share; FrameError names it if its frame is not as it should be."""
        own, fixed = self._cut(layout, frame.device)
        shape = FrameShape.of(frame, own.num_entries, [self._quantize], peer=peer)
        contents = shape.read(frame, step=step, bucket=bucket, peer=peer)
        if not contents.overflow and shape.num_fixed != len(fixed):
            raise FrameError(f"rank {peer} sent {shape.num_fixed} fixed entries, not {len(fixed)}; use the same model")
        return contents

    def answer(self, frames: Iterable[tuple[int, Tensor]], layout: Layout, *, step: int, bucket: int) -> Tensor:
        """Read the frame of each worker as it arrives, and answer all of them."""
        heard = {r: self.read(frame, layout, step=step, bucket=bucket, peer=r) for r, frame in frames}
        in_order = dict(sorted(heard.items()))  # so that sums do not depend on who was first
        return self.answer_to(in_order, layout, step=step, bucket=bucket)

    def answer_to(self, heard: Mapping[int, Contents], layout: Layout, *, step: int, bucket: int) -> Tensor:
        """A frame for all workers: the mean or the vote over those heard, or that one of them overflowed."""
        device = next(iter(heard.values())).values.device
        own, fixed = self._cut(layout, device)
        held = self._held.open(own, device).balance
        self._remember(held, step)
        if any(contents.overflow for contents in heard.values()):
            self._overflowed = True
            self._undo.restore_()
            shape = FrameShape(own.num_entries, 0, 0, self._quantize)
            return shape.write_overflow(device, step=step, bucket=bucket)
        if self._server.votes:
            places, votes = self._vote.take(heard, held, fixed, step)
            signs = FrameShape(own.num_entries, places.numel(), 0, Sign())
            trits = FrameShape(own.num_entries, own.num_entries, 0, Trits())
            shape, places, values = _smaller(signs, trits, places, votes, fixed[:0])
        else:
            shape, places, values = self._mean(list(heard.values()), held, fixed, own)
        codes, scale = shape.quantize.encode(values)
        if self.scheme.holds:
            said = shape.quantize.decode(codes, scale)[: values.numel()]
            whole, chosen = ((values - said) * len(heard)).tensor_split([shape.num_fixed])
            held.index_add_(0, fixed[: shape.num_fixed], whole)
            kernels.add_at_(held, [places], [chosen])
        if self._overflowed and self.undoes:
            self._undo.restore_()  # workers undo this bucket too, at the end of the step
        return shape.write_smallest(places, codes, scale, step=step, bucket=bucket)

    def _mean(
        self, heard: Sequence[Contents], held: Tensor, fixed: Tensor, own: Layout
    ) -> tuple[FrameShape, Tensor, Tensor]:
        """Add up, take out what is to be said: (shape, places, mean at the fixed entries and at those places)."""
        num_fixed = fixed.numel()
        whole = held.index_select(0, fixed)
        held.index_fill_(0, fixed, 0)
        for contents in heard:
            whole += contents.values[:num_fixed]
        positions = [one.positions for one in heard]
        chooses = self._server.down_rho > 0
        sparse = [one.values[num_fixed:] for one in heard]
        places, values = kernels.sum_over_union_(held, positions, sparse, take=not chooses)
        if not (kernels.all_finite(whole) and kernels.all_finite(values)):  # a sum beyond float32 is the largest there
            whole.nan_to_num_(nan=0.0)
            values.nan_to_num_(nan=0.0)
            if chooses:
                held.index_copy_(0, places.to(torch.int64), values)
        if chooses and places.numel():
            idle = SetAside(self._idle(held, own, places))
            places, values = self._largest(held, own, places)
            idle.restore_()
        mean = (torch.cat([whole, values]) if num_fixed else values).div_(len(heard))
        shape = FrameShape(own.num_entries, places.numel(), num_fixed, self._quantize)
        dense = FrameShape(own.num_entries, own.num_entries, 0, self._quantize)
        return _smaller(shape, dense, places, mean, fixed)

    def _largest(self, held: Tensor, own: Layout, heard: Tensor) -> tuple[Tensor, Tensor]:
        """The largest sums that an answer has room for, out of all that is held; zeros are not worth a place.

        No more than were heard of: where those fit, the rest of the room would go to what answers have rounded away.
        Workers that choose by parameter are answered by parameter, so that buckets do not matter.
        """
        windows = own.spans if self.scheme.select.per_parameter else Layout.of([""], [own.num_entries]).spans
        places = [heard[:0]]
        values = [held[:0]]
        for window, most in zip(windows, _counts_within(windows, heard), strict=True):
            room = min(most, max(1, round(self._server.down_rho * window.num_entries)))
            if not room:
                continue
            if (own, window) not in self._searches:
                self._searches[own, window] = kernels.new_search(window.num_entries, room, held.device)
            at, sums = kernels.withdraw_(held[window.start : window.stop], None, room, self._searches[own, window])
            if int(sums.count_nonzero()) < room:
                there = nonzero(sums)
                at = at.index_select(0, there)
                sums = sums.index_select(0, there)
            places.append(at.add_(window.start))
            values.append(sums)
        return torch.cat(places), torch.cat(values)

    def _idle(self, held: Tensor, own: Layout, heard: Tensor) -> list[Tensor]:
        """What is held of parameters that nobody spoke of, where DDP would drop what is said of those."""
        if not self.holds_idle:
            return []
        counted = zip(own.spans, _counts_within(own.spans, heard), strict=True)
        return [held[span.start : span.stop] for span, count in counted if not count]

    def _cut(self, layout: Layout, device: torch.device) -> tuple[Layout, Tensor]:
        """This share of a bucket, and where in it the entries lie that all workers send at every step; cut once."""
        if layout not in self._cuts:
            own = Shares(layout, self.num_shares).layouts[self.share]
            whole = {span.name for span in self.scheme.select.plan(layout, self.scheme.select.density).fixed}
            self._cuts[layout] = own, positions_of([span for span in own.spans if span.name in whole], device)
        return self._cuts[layout]

    def _remember(self, held: Tensor, step: int) -> None:
        if step != self._step:
            self._step = step
            self._overflowed = False
            self._undo.forget()
        if self.undoes and self.scheme.holds:
            self._undo.remember([held])

    def state_dict(self) -> dict[str, Any]:
        """What is held, this share's piece of each parameter, and the voters' records; empty where there is neither."""
        held = self._held.state_dict()["residual"] if self.scheme.holds else {}
        return {"num_shares": self.num_shares, "held": held, "records": self._vote.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._held.load_state_dict({"residual": dict(saved["held"])})
        self._vote.load_state_dict(saved["records"])


def _counts_within(windows: Sequence[Span], positions: Tensor) -> list[int]:
    """How many of these ascending positions lie in each window."""
    ends = positions.new_tensor([(window.start, window.stop) for window in windows])
    counts: list[int] = torch.searchsorted(positions, ends).diff().flatten().tolist()
    return counts


def _smaller(
    shape: FrameShape, dense: FrameShape, places: Tensor, values: Tensor, fixed: Tensor
) -> tuple[FrameShape, Tensor, Tensor]:
    """These places, or all entries where that is smaller: `values` at the fixed ones and there, zeros elsewhere."""
    if shape.num_bytes <= dense.num_bytes:
        return shape, places, values
    n = dense.num_entries
    everywhere = values.new_zeros(n)
    everywhere[torch.cat([fixed, places])] = values
    return dense, torch.arange(n, dtype=torch.int32, device=values.device), everywhere
