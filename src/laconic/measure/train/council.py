"""What the workers of a job tell each other outside the exchange of gradients: sums, and who is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.server.client import ServerClient


class Council(Protocol):
    """The workers that are there; each makes the same calls in the same order."""

    @property
    def place(self) -> int:
        """Which of them this one is, from 0; the first leads: it writes and prints."""

    @property
    def num_living(self) -> int:
        """How many there are."""

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all of them, on the CPU."""

    def gather(self, mine: Sequence[float]) -> list[list[float]]:
        """The same numbers of all of them, by place."""

    def share_(self, buffers: Iterable[Tensor]) -> None:
        """Make a model's buffers the same everywhere."""

    def server_facts(self) -> list[dict[str, Any]]:
        """What each dedicated server counted."""


class Circle:
    """Workers that all live as long as the job, over a process group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self.place, self.num_living = dist.get_rank(group), dist.get_world_size(group)

    def total(self, tensor: Tensor) -> Tensor:
        there = tensor.to(self._device)
        dist.all_reduce(there, group=self._group)
        return there.cpu()

    def gather(self, mine: Sequence[float]) -> list[list[float]]:
        return _rows(self, mine)

    def share_(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:  # each worker has its own since the last forward; the first one's are looked at
            dist.broadcast(buffer, group=self._group, group_src=0)

    def server_facts(self) -> list[dict[str, Any]]:
        return []


class ServedCouncil:
    """Workers some of whom may die, through the servers that notice."""

    def __init__(self, transport: ServerClient) -> None:
        self._transport = transport

    @property
    def place(self) -> int:
        return self._transport.place

    @property
    def num_living(self) -> int:
        return self._transport.num_living

    def total(self, tensor: Tensor) -> Tensor:
        return self._transport.total(tensor)

    def gather(self, mine: Sequence[float]) -> list[list[float]]:
        return _rows(self, mine)

    def share_(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            if buffer.is_floating_point():
                buffer.copy_(self._transport.total(buffer) / self._transport.num_living)

    def server_facts(self) -> list[dict[str, Any]]:
        return self._transport.server_stats()


def _rows(council: Council, mine: Sequence[float]) -> list[list[float]]:
    """One row from each: the sum of tables in which only one's own row is filled."""
    table = torch.zeros(council.num_living, len(mine), dtype=torch.float64)
    table[council.place] = torch.tensor(mine, dtype=torch.float64)
    rows: list[list[float]] = council.total(table).tolist()
    return rows
