"""Whole runs of entries: one number stands for all positions of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels import repeated
from laconic.wire.index_codec import IndexBlock, foretold_block


@dataclass(frozen=True)
class Runs:
    """The numbers of the runs, in the shortest code whose length is foretold: about 2 + log2(n/k) bits a run.

    Every span is cut into runs of `length` entries, of which the last may be shorter. All runs of a bucket are numbered
    in order, and `num_selected` of them go, as every worker knows beforehand.
    """

    codec_id: ClassVar[int] = 4

    spans: tuple[tuple[int, int], ...]  # (start, stop), ascending
    length: int
    num_selected: int

    @property
    def index_block(self) -> IndexBlock:
        """How the positions of a frame are written, and in how many words."""
        return IndexBlock(self, foretold_block(self._num_runs, self.num_selected).num_words)

    def encode(self, positions: Tensor, n: int) -> Tensor:
        starts, _ = _runs(self.spans, self.length, positions.device)
        numbers = torch.searchsorted(starts, positions, right=True, out_int32=True) - 1
        selected = numbers[starts[numbers] == positions]  # of each run its first position alone
        return foretold_block(self._num_runs, self.num_selected).codec.encode(selected, self._num_runs)

    def decode(self, words: Tensor, n: int, k: int) -> Tensor:
        codec = foretold_block(self._num_runs, self.num_selected).codec
        numbers = codec.decode(words, self._num_runs, self.num_selected)
        if numbers.dim() == 1:
            return self._positions(numbers, k)
        return torch.stack([self._positions(row, k) for row in numbers])

    def _positions(self, numbers: Tensor, k: int) -> Tensor:
        """The k entries of these runs, ascending."""
        starts, counts = (table[numbers] for table in _runs(self.spans, self.length, numbers.device))
        ends = counts.cumsum(0, dtype=torch.int32)
        if int(ends[-1]) != k:
            raise FrameError(f"its runs hold {int(ends[-1])} positions, not {k}")
        return repeated(starts - ends + counts, counts, k) + torch.arange(k, dtype=torch.int32, device=numbers.device)

    @property
    def _num_runs(self) -> int:
        return sum(-(-(stop - start) // self.length) for start, stop in self.spans)


@lru_cache(maxsize=1024)
def _runs(spans: tuple[tuple[int, int], ...], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where all runs start, and how many entries they have, int32."""
    starts = [torch.arange(start, stop, length, dtype=torch.int32, device=device) for start, stop in spans]
    counts = [(stop - at).clamp_(max=length) for at, (_, stop) in zip(starts, spans, strict=True)]
    return torch.cat(starts), torch.cat(counts)
