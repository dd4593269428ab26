"""The workers of a job outside the exchange of gradients: sums over them, and who is alive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.transport import Transport, naming_lost_peers, rows_of


@dataclass(frozen=True)
class EndFacts:
    """Facts of others than the workers that came to the end."""

    servers: list[dict[str, Any]] = field(default_factory=list)  # what each dedicated server counted
    lost_workers: dict[str, str] = field(default_factory=dict)  # by rank, and how they died


class WorkerGroup:
    """The workers that are there, who gather or add up; each makes the same calls in the same order."""

    shares_clock: ClassVar[bool] = False  # whether their times are of all of them together
    place: int  # the number of this one among them, from 0; the first leads: it writes and prints
    num_living: int

    def gather(self, own: Sequence[float]) -> list[list[float]]:
        """The same numbers of all of them, by place."""
        return rows_of(self, own)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all of them, on the CPU."""
        rows = self.gather(tensor.flatten().tolist())
        return torch.tensor(rows, dtype=torch.float64).sum(0).to(tensor.dtype).view(tensor.shape)

    def share_(self, buffers: Iterable[Tensor]) -> None:
        """Make a model's buffers the same everywhere."""

    def end_facts(self) -> EndFacts:
        """The counts of servers, and who has died."""
        return EndFacts()


class ProcessWorkers(WorkerGroup):
    """Workers that all live as long as the job, over a process group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.place = dist.get_rank(group)
        self.num_living = dist.get_world_size(group)

    def total(self, tensor: Tensor) -> Tensor:
        summed = tensor.to(self._device)
        with naming_lost_peers(self.place):
            dist.all_reduce(summed, group=self._group)
        return summed.cpu()

    def share_(self, buffers: Iterable[Tensor]) -> None:
        with naming_lost_peers(self.place):
            for buffer in buffers:  # each worker has its own since the last forward; the first one's are looked at
                dist.broadcast(buffer, group=self._group, group_src=0)


class ServedWorkers(WorkerGroup):
    """Workers some of whom may die, through the servers that notice."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def place(self) -> int:  # type: ignore[override]
        return self._transport.place

    @property
    def num_living(self) -> int:  # type: ignore[override]
        return self._transport.num_living

    def total(self, tensor: Tensor) -> Tensor:
        return self._transport.total(tensor)

    def share_(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            if buffer.is_floating_point():
                buffer.copy_(self._transport.total(buffer) / self._transport.num_living)

    def end_facts(self) -> EndFacts:
        servers: list[dict[str, Any]] = self._transport.server_stats()
        return EndFacts(servers, servers[0]["lost"])
