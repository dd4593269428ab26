"""What gathering does to one bucket on a GPU, in two recordings: all before its frame leaves, and all after."""

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels import Recorded, Recorder
from laconic.paths.frame_plan import FramePlan
from laconic.paths.path import Taken, Work
from laconic.quantize import Quantizer


class Stations:
    """What buckets share, which pass each station one after the other: its recorder, and room for everyone's frames."""

    def __init__(self, device: torch.device, num_workers: int) -> None:
        self.writing = Recorder(device)
        self.applying = Recorder(device)
        self.num_workers = num_workers
        self._device = device
        self._rooms: dict[int, Tensor] = {}  # by the length of a frame

    def room(self, num_bytes: int) -> Tensor:
        """A row for each worker's frame of this length."""
        if num_bytes not in self._rooms:
            shape = self.num_workers, num_bytes
            self._rooms[num_bytes] = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return self._rooms[num_bytes]


@dataclass(frozen=True)
class _Written:
    positions: Tensor
    values: Tensor  # as they were taken
    sent: Tensor  # as the frame says them


class BucketOnGpu:
    """Its frame is written by a GPU into pinned memory, and everyone's are read and added there; each in one go.

    A worker that sees Inf or NaN deposits nothing, and its frame says so: what it took out of the balance goes back, as
    at those who hear it.
    """

    def __init__(self, plan: FramePlan, quantize: Quantizer, stations: Stations) -> None:
        self._plan = plan
        self._quantize = quantize
        self._num_workers = stations.num_workers
        self._writing: Recorded[_Written] = Recorded(stations.writing)
        self._applying: Recorded[None] = Recorded(stations.applying)
        self._frames = stations.room(plan.shape.num_bytes)
        pinned = self._frames.is_cuda
        self._head = torch.zeros(len(plan.shape.head(step=0, bucket=0)), dtype=torch.int32, pin_memory=pinned)
        self._frame = torch.empty(plan.shape.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._damaged = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)
        self._written: _Written | None = None

    def write(self, work: Work) -> None:
        """Look, deposit, choose, withdraw and write; the frame is there when the stream is through."""
        self._head.numpy()[:] = self._plan.shape.head(**work.frame_id)
        self._written = self._writing.run(lambda: self._write(work), self._key(work))

    def frame(self, work: Work) -> Tensor:
        """What was written; only now is it known whether the gradient is finite."""
        assert self._written is not None
        work.finite = not self._plan.shape.is_overflow(self._frame)
        work.taken = Taken(self._written.positions, self._plan.num_fixed, self._written.values)
        return self._frame

    def apply_(self, work: Work, frames: Tensor) -> None:
        """Owe what rounding lost, and overwrite the bucket with the mean of everyone's frames, which are foretold."""
        self._frames.copy_(frames, non_blocking=True)
        written = self._written
        assert written is not None
        where = [each.data_ptr() for each in (written.positions, written.values, written.sent)]
        self._applying.run(lambda: self._apply_(work, written), (*self._key(work), *where))

    @property
    def is_damaged(self) -> bool:
        """Whether what was applied is worth nothing; known when the stream is through."""
        return bool(self._damaged.numpy()[0])

    def _key(self, work: Work) -> tuple[float, ...]:
        """Where a recording finds what it did not make, and what it takes as given."""
        return work.flat.data_ptr(), work.account.balance.data_ptr(), work.scale

    def _write(self, work: Work) -> _Written:
        plan = self._plan
        strange = torch.zeros(1, dtype=torch.int32, device=work.device)
        kernels.flag_nonfinite_(strange, work.flat, work.too_large)
        kernels.zero_if_(work.flat, strange)
        chosen, values = plan.withdraw_(work.account.balance, work.account.due_(work.flat, 1 / work.scale))
        codes, scale = self._quantize.encode(values)
        sent = self._quantize.decode(codes, scale)[: values.numel()]
        head = self._head.to(work.device, non_blocking=True, copy=True)
        self._frame.copy_(plan.shape.write_after(head, chosen, codes, scale, strange), non_blocking=True)
        positions = plan.positions(chosen)
        assert positions is not None, "what goes whole has no index"
        return _Written(positions, values, sent)

    def _apply_(self, work: Work, written: _Written) -> None:
        damaged = torch.zeros(1, dtype=torch.int32, device=work.device)
        positions, values = self._plan.shape.read_later(self._frames, damaged)
        work.account.refund_(written.positions, written.values - written.sent)
        self._plan.add_up_(work.flat, positions, values, work.scale / self._num_workers)
        self._damaged.copy_(damaged, non_blocking=True)
