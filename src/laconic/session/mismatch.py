"""Replicas stay equal: eight bytes of each parameter, compared now and then."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic import kernels
from laconic.errors import LaconicError, SchemeError
from laconic.layout import local
from laconic.transport import Transport, rows_of

_log = logging.getLogger("laconic.session")

OnMismatch = Literal["warn", "error", "heal"]

_FACTOR = 0x9E3779B97F4A7C15  # odd
_HALF = 1 << 32


class Replicas:
    """Parameters that every step leaves alike on all workers, compared in every `every`-th of them.

    A difference is a warning, an error on all workers, or mended: those that differ become the majority's, or, where
    there is none, those of the first of the largest parties. What an optimizer keeps is not compared.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], transport: Transport, *, every: int, on_mismatch: OnMismatch
    ) -> None:
        self._parameters = parameters
        self._transport = transport
        self._every = every
        self._on_mismatch = on_mismatch
        self._num_steps = 0

    def are_due(self) -> bool:
        """Return whether they are to be compared in this step; to be called once in each."""
        self._num_steps += 1
        return self._every > 0 and self._num_steps % self._every == 0

    def check_(self) -> None:
        """Compare, and do what is asked for; a call that all workers make while nobody uses their parameters."""
        own = [print_ % (1 << 64) for print_ in torch.stack([*map(fingerprint, self._parameters.values())]).tolist()]
        with self._transport.traffic.uncounted():
            if len(set(self._gather([_folded(own)]).values())) > 1:
                self._mend_(self._gather(own))

    def _mend_(self, by_rank: Mapping[int, tuple[int, ...]]) -> None:
        """Report, or repair, replicas whose parameters have these fingerprints."""
        ((right, _),) = Counter(by_rank.values()).most_common(1)
        alike = [rank for rank in by_rank if by_rank[rank] == right]
        others = [rank for rank in by_rank if by_rank[rank] != right]
        names = [
            name
            for name, prints in zip(self._parameters, zip(*by_rank.values(), strict=True), strict=True)
            if len(set(prints)) > 1
        ]
        text = (
            f"the parameters of {_ranks(others)} are not those of {_ranks(alike)}, first in {names[0]!r}; "
            "look for what changes them on some ranks alone"
        )
        if self._on_mismatch == "error":
            raise LaconicError(text)
        if self._on_mismatch == "heal":
            text = f"{text}; they are now those of rank {alike[0]}"
            for name in names:
                self._copy_(self._parameters[name], alike[0])
        if self._transport.rank == min(by_rank):
            _log.warning(text)

    def _copy_(self, parameter: Tensor, source: int) -> None:
        """Overwrite a parameter with what it is on another worker."""
        shard = local(parameter.data)  # of which autograd need not know
        own = shard.contiguous()
        frame = own.view(-1).view(torch.uint8) if self._transport.rank == source else None
        received = self._transport.broadcast(frame, source, own.nbytes).clone()  # a word may not begin anywhere
        shard.copy_(received.view(own.dtype).view(own.shape))

    def _gather(self, own: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Everyone's numbers of 64 bits, by rank."""
        halves = [half for number in own for half in divmod(number, _HALF)]  # a float64 holds 53 bits
        table = rows_of(self._transport, [self._transport.rank + 1, *halves])
        return {
            int(row[0]) - 1: tuple(int(high) * _HALF + int(low) for high, low in zip(row[1::2], row[2::2], strict=True))
            for row in table
            if row[0]  # zeros are of one that has died
        }


def check_on_mismatch(on_mismatch: str) -> None:
    """Raise unless it is one of those that are known."""
    if on_mismatch not in get_args(OnMismatch):
        raise SchemeError(f"on_mismatch is {on_mismatch!r}; give 'warn', 'error' or 'heal'")


def fingerprint(tensor: Tensor) -> Tensor:
    """Eight bytes that tell whether two tensors hold the same bits, int64, on the tensor's device."""
    raw = local(tensor).reshape(-1).view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4:
        raw = pad(raw, (0, -raw.numel() % 4))  # a copy
    return kernels.check_sum(raw.view(torch.int32))


def _folded(prints: Sequence[int]) -> int:
    folded = 0
    for each in prints:
        folded = (folded * _FACTOR + each) % (1 << 64)
    return folded


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
