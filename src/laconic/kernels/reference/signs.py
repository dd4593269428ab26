"""Signs in one bit each, where a one is negative, and the majority of several voters' signs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.kernels.contract import kernel
from laconic.kernels.reference.bits import pack_lanes, unpack_lanes


@kernel
def pack_signs(x: Tensor) -> Tensor:
    """The sign bits of float32 `x`, as int32 words; zero is positive unless it is -0."""
    return pack_lanes((x.view(torch.int32) < 0).to(torch.int32), 1)


@kernel
def unpack_signs(words: Tensor, n: int, scale: float) -> Tensor:
    """n float32 entries +scale or -scale, by their bits."""
    positive = torch.tensor(scale, dtype=torch.float32, device=words.device)
    return torch.where(unpack_lanes(words, n, 1) == 1, -positive, positive)


@kernel
def vote(ballots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(negative, tie), words: ones where more than half of the voters' packed signs are ones, and where half are."""
    num_bits = 32 * ballots[0].numel()
    ones = torch.zeros(num_bits, dtype=torch.int32, device=ballots[0].device)
    for ballot in ballots:
        ones += unpack_lanes(ballot, num_bits, 1)
    doubled = 2 * ones
    num_voters = len(ballots)
    outcomes = [pack_lanes(one.to(torch.int32), 1) for one in (doubled > num_voters, doubled == num_voters)]
    return outcomes[0], outcomes[1]
