"""What carries the bytes: processes over torch.distributed, or virtual workers in one process."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from laconic.exchange.traffic import Traffic


class Medium(Protocol):
    """One worker's end of a network; every worker makes the same calls in the same order."""

    rank: int
    num_workers: int
    traffic: Traffic

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        """Replace `tensor` by the sum over all workers, bit-equal on each."""

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        """Everyone's frame in rank order, as (num_workers, len(frame)); frames have equal lengths."""

    def all_to_all(self, rows: Tensor, kind: str) -> Tensor:
        """Row r of `rows` (num_workers, n) goes to worker r; returns the rows for this one, in rank order."""

    def swap(self, frame: Tensor, peer: int, kind: str) -> Tensor:
        """Give `frame` to `peer`, who makes the same call, and get its frame; with oneself nothing is sent."""
