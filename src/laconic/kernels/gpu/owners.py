"""An owner's replies to frames, by the kernels of this device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from laconic.kernels.gpu.sparse import all_finite, sum_over_union_, withdraw_
from laconic.kernels.reference.owners import MeanKernels, Window, take_mean_by

_GPU = MeanKernels(sum_over_union_, withdraw_, all_finite)


def take_mean_(
    held: Tensor,
    fixed: Tensor,
    positions: Sequence[Tensor],
    values: Sequence[Tensor],
    windows: Sequence[Window],
    searches: Sequence[Tensor],
    spare: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor]:
    return take_mean_by(_GPU, held, fixed, positions, values, windows, searches, spare)
