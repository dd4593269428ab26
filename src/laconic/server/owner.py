"""The owner of a share: adds up what the workers send of it, or takes their vote, and answers in the smallest form."""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.exchange import Shares
from laconic.kernels.reference.nonzero import nonzero
from laconic.layout import Layout, positions_of
from laconic.memory import Ledger, Residual
from laconic.memory.undo import SetAside, Undo
from laconic.quantize import Sign, Trits
from laconic.scheme import Scheme
from laconic.server.vote import Vote
from laconic.wire import Contents, FrameShape


class Owner:
    """Answers for one share of every bucket, and holds what its answers leave out: sums over workers, by parameter.

    held += what was heard ; answer(held[U] / M) ; held[U] -= M * what the answer says

    Where nothing is left out, `held` is zero between steps. `undoes` is for steps that a GradScaler may skip whole,
    `holds_idle` for models of which a step may leave parameters out: DDP then drops what is said of those.
    """

    def __init__(
        self, scheme: Scheme, share: int, num_shares: int, *, undoes: bool = False, holds_idle: bool = False
    ) -> None:
        self._scheme = scheme
        self._server = scheme.server
        self._quantize = scheme.frame_code
        self._share = share
        self._num_shares = num_shares
        self._held = Ledger(Residual())
        self._own: dict[Layout, Layout] = {}
        self._fixed: dict[Layout, Tensor] = {}
        self._searches: dict[tuple[Layout, int], Tensor] = {}  # by share and where a window begins
        self._vote = Vote(weighted=scheme.server.combine == "weighted")
        self._undoes = undoes
        self._holds_idle = holds_idle
        self._undo = Undo()
        self._step = -1
        self._overflowed = False  # in some bucket of this step

    @property
    def num_bytes(self) -> int:
        """What it holds, at most its share of the model as float32."""
        return self._held.num_bytes if self._scheme.holds else 0

    def read(self, frame: Tensor, layout: Layout, *, step: int, bucket: int, peer: int) -> Contents:
        """What one worker says of this share; FrameError names it if its frame is not as it should be."""
        own = self._own_layout(layout)
        num_fixed = self._fixed_places(layout, frame.device).numel()
        shape = FrameShape.of(frame, own.num_entries, [self._quantize], peer=peer)
        contents = shape.read(frame, step=step, bucket=bucket, peer=peer)
        if not contents.overflow and shape.num_fixed != num_fixed:
            raise FrameError(f"rank {peer} sent {shape.num_fixed} fixed entries, not {num_fixed}; use the same model")
        return contents

    def answer(self, frames: Iterable[tuple[int, Tensor]], layout: Layout, *, step: int, bucket: int) -> Tensor:
        """Read the frame of each worker as it arrives, and answer all of them."""
        heard = {r: self.read(frame, layout, step=step, bucket=bucket, peer=r) for r, frame in frames}
        in_order = dict(sorted(heard.items(), key=itemgetter(0)))  # so that sums do not depend on who was first
        return self.answer_to(in_order, layout, step=step, bucket=bucket)

    def answer_to(self, heard: Mapping[int, Contents], layout: Layout, *, step: int, bucket: int) -> Tensor:
        """A frame for all workers: the mean or the vote over those heard, or that one of them overflowed."""
        own = self._own_layout(layout)
        device = next(iter(heard.values())).values.device
        fixed = self._fixed_places(layout, device)
        held = self._held.open(own, device).balance
        self._remember(held, step)
        if any(contents.overflow for contents in heard.values()):
            self._overflowed = True
            self._undo.restore_()
            shape = FrameShape(own.num_entries, 0, 0, self._quantize)
            return shape.write_overflow(device, step=step, bucket=bucket)
        if self._server.votes:
            shape, places, values = self._majority(heard, held, fixed, step)
        else:
            shape, places, values = self._mean(list(heard.values()), held, fixed, own)
        codes, scale = shape.quantize.encode(values)
        if self._scheme.holds:
            said = shape.quantize.decode(codes, scale)[: values.numel()]
            whole, chosen = ((values - said) * len(heard)).tensor_split([shape.num_fixed])
            held.index_add_(0, fixed[: shape.num_fixed], whole)
            kernels.add_at_(held, [places], [chosen])
        if self._overflowed and self._undoes:
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
        kernels.add_at_(held, [one.positions for one in heard], [one.values[num_fixed:] for one in heard])
        places = union([one.positions for one in heard], own.num_entries)
        values = held.index_select(0, places)
        if not (kernels.all_finite(whole) and kernels.all_finite(values)):  # a sum beyond float32 is the largest there
            whole.nan_to_num_(nan=0.0)
            held.index_copy_(0, places.to(torch.int64), values.nan_to_num_(nan=0.0))
        if self._server.down_rho and places.numel():
            idle = SetAside(self._idle(held, own, places))
            places, values = self._largest(held, own, places)
            idle.restore_()
        else:
            held.index_fill_(0, places.to(torch.int64), 0)
        mean = torch.cat([whole, values]).div_(len(heard))
        shape = FrameShape(own.num_entries, places.numel(), num_fixed, self._quantize)
        dense = FrameShape(own.num_entries, own.num_entries, 0, self._quantize)
        if shape.num_bytes <= dense.num_bytes:
            return shape, places, mean
        everywhere = mean.new_zeros(own.num_entries)
        everywhere[torch.cat([fixed, places])] = mean
        return dense, torch.arange(own.num_entries, dtype=torch.int32, device=mean.device), everywhere

    def _largest(self, held: Tensor, own: Layout, heard: Tensor) -> tuple[Tensor, Tensor]:
        """The largest sums that an answer has room for, out of all that is held; zeros are not worth a place.

        No more than were heard of: where those fit, the rest of the room would go to what answers have rounded away.
        Workers that choose by parameter are answered by parameter, so that buckets do not matter.
        """
        by_parameter = self._scheme.select.per_parameter
        windows = [(span.start, span.stop) for span in own.spans] if by_parameter else [(0, own.num_entries)]
        num_heard = _counts_within(windows, heard) if by_parameter else [heard.numel()]
        places = [heard[:0]]
        values = [held[:0]]
        for (start, stop), most in zip(windows, num_heard, strict=True):
            room = min(most, max(1, round(self._server.down_rho * (stop - start))))
            if not room:
                continue
            if (own, start) not in self._searches:
                self._searches[own, start] = kernels.new_search(stop - start, room, held.device)
            at, sums = kernels.withdraw_(held[start:stop], None, room, self._searches[own, start])
            there = nonzero(sums)
            places.append(at.index_select(0, there) + start)
            values.append(sums.index_select(0, there))
        return torch.cat(places), torch.cat(values)

    def _idle(self, held: Tensor, own: Layout, heard: Tensor) -> list[Tensor]:
        """What is held of parameters that nobody spoke of, where DDP would drop what is said of those."""
        if not self._holds_idle:
            return []
        counts = _counts_within([(span.start, span.stop) for span in own.spans], heard)
        return [held[span.start : span.stop] for span, count in zip(own.spans, counts, strict=True) if not count]

    def _majority(
        self, heard: Mapping[int, Contents], scratch: Tensor, fixed: Tensor, step: int
    ) -> tuple[FrameShape, Tensor, Tensor]:
        """The entries on which there is a majority, and its signs; as trits where that is smaller."""
        n = scratch.numel()
        places, votes = self._vote.take(heard, scratch, fixed, step)
        shape = FrameShape(n, places.numel(), 0, Sign())
        trits = FrameShape(n, n, 0, Trits())
        if shape.num_bytes <= trits.num_bytes:
            return shape, places, votes
        everywhere = scratch.new_zeros(n)
        everywhere[places] = votes
        return trits, torch.arange(n, dtype=torch.int32, device=scratch.device), everywhere

    def _own_layout(self, layout: Layout) -> Layout:
        """This share of a bucket, cut once."""
        if layout not in self._own:
            self._own[layout] = Shares(layout, self._num_shares).layouts[self._share]
        return self._own[layout]

    def _fixed_places(self, layout: Layout, device: torch.device) -> Tensor:
        """Where in the share the entries lie that all workers send at every step."""
        if layout not in self._fixed:
            own = self._own_layout(layout)
            whole = {span.name for span in self._scheme.select.plan(layout, self._scheme.select.density).fixed}
            self._fixed[layout] = positions_of([span for span in own.spans if span.name in whole], device)
        return self._fixed[layout]

    def _remember(self, held: Tensor, step: int) -> None:
        if step != self._step:
            self._step = step
            self._overflowed = False
            self._undo.forget()
        if self._undoes and self._scheme.holds:
            self._undo.remember([held])

    def state_dict(self) -> dict[str, Any]:
        """What is held, this share's piece of each parameter, and the voters' records; empty where there is neither."""
        held = self._held.state_dict()["residual"] if self._scheme.holds else {}
        return {"num_shares": self._num_shares, "held": held, "records": self._vote.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._held.load_state_dict({"residual": dict(saved["held"])})
        self._vote.load_state_dict(saved["records"])


def _counts_within(windows: Sequence[tuple[int, int]], positions: Tensor) -> list[int]:
    """How many of these ascending positions lie in each window."""
    counts: list[int] = torch.searchsorted(positions, positions.new_tensor(windows)).diff().flatten().tolist()
    return counts


def union(positions: Sequence[Tensor], n: int) -> Tensor:
    """Positions that occur in any of the lists, ascending, int32: by a map of n bits, so without sorting."""
    return kernels.unpack_bits(kernels.set_bits(torch.cat(list(positions)), n))
