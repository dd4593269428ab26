"""What carries the bytes: processes over torch.distributed, or virtual workers in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from laconic.layout import Layout
from laconic.transport.traffic import Traffic

Answer = Callable[[Iterable[tuple[int, Tensor]]], Tensor]  # an owner's, to (rank, part) of each worker as they arrive


class Transport(Protocol):
    """One worker's end of a network; every worker makes the same calls in the same order."""

    rank: int
    num_workers: int
    num_shares: int  # owners who answer for the entries of a bucket, each for its share
    owned_share: int | None  # the one that this worker answers for
    wire: torch.device | None  # where frames are written and read; None: where the gradients are
    traffic: Traffic

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        """Replace `tensor` by the sum over all workers, bit-equal on each."""

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        """Everyone's frame in rank order, as (num_workers, len(frame)); frames have equal lengths."""

    def all_to_all(self, rows: Tensor, kind: str) -> Tensor:
        """Row r of `rows` (num_workers, n) goes to worker r; returns the rows for this one, in rank order."""

    def broadcast(self, frame: Tensor | None, speaker: int) -> Tensor:
        """What one worker says to all, of any length: its `frame`, None on the others; empty where it is gone."""

    def announce(self, layout: Layout, *, step: int, bucket: int) -> None:
        """Tell owners that are no workers which bucket comes next."""

    def push_pull(self, parts: Sequence[Tensor], answer: Answer | None, longest: Sequence[int]) -> list[Tensor]:
        """Part p (bytes) goes to owner p; returns every owner's answer to what it heard, the same on all workers.

        `answer` is this worker's own, for the share it owns. No part for owner p, nor what it answers, has more than
        longest[p] bytes. Answers may lie in buffers that the next call overwrites.
        """

    def swap(self, frame: Tensor, peer: int, kind: str, num_back: int) -> Tensor:
        """Give `frame` to `peer`, who makes the same call, and get its frame of so many elements; either may be empty.

        With oneself nothing is sent.
        """
