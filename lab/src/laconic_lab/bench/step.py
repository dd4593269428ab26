"""The cost of one process's share of an exchange, stage by stage, without a network."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from laconic.layout import Bucket, Layout
from laconic.recipes import parse
from laconic.scheme import Scheme
from laconic.session import Session
from laconic.transport import Collectives, Push, Traffic
from laconic_lab.bench.common import laplace
from laconic_lab.errors import TaskError

_MATRIX = 1024  # rows and columns of a parameter; 4 MiB, as in a GPT of 85 M
_BUCKET_BYTES = (1 << 20, 25 << 20)  # DDP's defaults: the first bucket, and all others
_STEPS_BEFORE = 10  # until kernels are compiled and thresholds known
_NUM_GRADIENTS = 2  # that take turns


@dataclass(frozen=True)
class StepBench:
    """Medians over steps; what is sent and heard crosses to the host and back where it would on the way to a socket.

    Where a GPU chooses and encodes in one recording, all of that is encoding.
    """

    n: int
    workers: int
    scheme: str
    device: str
    kernels: str
    num_buckets: int
    choose_ms: float
    encode_ms: float
    apply_ms: float  # reading included
    total_ms: float
    wire_bytes: int  # that leave this worker in a step
    peak_bytes: int | None  # that a step takes beyond the gradients and what is kept; None where nobody counts
    passes: float | None  # of a selection over its entries


def bench_step(n: int, workers: int, scheme: str, device: str = "cpu", steps: int = 20, seed: int = 0) -> StepBench:
    """Steps of a scheme on n Laplace gradients, in DDP's default buckets, among workers who all say the same."""
    parsed = parse(scheme)
    if not isinstance(parsed, Scheme) or parsed.has_owners:
        raise TaskError(
            f"`bench step` exchanges gradients among workers, and {scheme} does not; give topk, maxnorm, ..."
        )
    own = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(own):  # as a session has one
        return _bench_step(parsed, n, workers, device, steps, seed)


def _bench_step(parsed: Scheme, n: int, workers: int, device: str, steps: int, seed: int) -> StepBench:
    generator = torch.Generator(device).manual_seed(seed)
    layouts = _layouts(n)
    gradients = [[laplace(layout.num_entries, generator) for layout in layouts] for _ in range(_NUM_GRADIENTS)]
    flats = [torch.empty_like(gradient) for gradient in gradients[0]]
    memory = _PeakMemory(device)
    transport = Echo(workers)
    session = Session(parsed, transport)

    def step(number: int) -> None:
        for index, (layout, flat) in enumerate(zip(layouts, flats, strict=True)):
            flat.copy_(gradients[number % _NUM_GRADIENTS][index])
            if flat.is_cuda:
                torch.cuda.current_stream().synchronize()  # the gradient is there before anything is chosen of it
            session.exchange_(Bucket(index, layout, flat, is_last=index == len(layouts) - 1))

    for number in range(_STEPS_BEFORE):
        step(number)
    memory.begin(sum(each.nbytes for kind in session.state_dict()["memory"].values() for each in kind.values()))
    spent: dict[str, list[float]] = {phase: [] for phase in session.stats().seconds}
    bytes_before = session.stats().bytes_out
    for number in range(steps):
        before = session.stats().seconds
        step(number)
        for phase, seconds in session.stats().seconds.items():
            spent[phase].append(1e3 * (seconds - before[phase]))
    stats = session.stats()
    choose, encode, apply = (spent[phase] for phase in ("select", "encode", "decode"))
    return StepBench(
        n=n,
        workers=workers,
        scheme=str(parsed),
        device=device,
        kernels=stats.kernels,
        num_buckets=len(layouts),
        choose_ms=statistics.median(choose),
        encode_ms=statistics.median(encode),
        apply_ms=statistics.median(apply),
        total_ms=statistics.median(map(sum, zip(choose, encode, apply, strict=True))),
        wire_bytes=(stats.bytes_out - bytes_before) // steps,
        peak_bytes=memory.more(),
        passes=stats.passes,
    )


def _layouts(n: int) -> list[Layout]:
    """Square matrices in the buckets that DDP makes of them, the last one first."""
    full, rest = divmod(n, _MATRIX * _MATRIX)
    shapes = [(_MATRIX, _MATRIX)] * full + [(rest,)] * (rest > 0)
    layouts: list[Layout] = []
    bucket: list[int] = []  # numbers of shapes
    for number in range(len(shapes)):
        bucket.append(number)
        num_bytes = 4 * sum(torch.Size(shapes[each]).numel() for each in bucket)
        if num_bytes >= _BUCKET_BYTES[min(len(layouts), 1)] or number == len(shapes) - 1:
            layouts.append(Layout.of([f"matrix{each}" for each in bucket], [shapes[each] for each in bucket]))
            bucket = []
    return layouts


class _PeakMemory:
    """The most memory in use while steps run, beyond what was in use before their session began and what that keeps."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._status = Path("/proc/self/status")
        self._before = torch.cuda.memory_allocated() if device == "cuda" else 0

    def begin(self, num_kept: int) -> None:
        """The steps that count come next."""
        if self._device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before += num_kept
        elif self._status.exists():
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is there
            self._before = self._resident("VmRSS")

    def more(self) -> int | None:
        if self._device == "cuda":
            return torch.cuda.max_memory_allocated() - self._before + _held_for_recordings()
        return max(0, self._resident("VmHWM") - self._before) if self._status.exists() else None

    def _resident(self, field: str) -> int:
        lines = self._status.read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _held_for_recordings() -> int:
    """Bytes that only replays use, so that nobody counts them as allocated."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    recorded = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in recorded)


class Echo(Collectives):
    """One of M workers' ends; messages lie on the host, as on their way to a socket."""

    def __init__(self, num_workers: int) -> None:
        self.rank = 0
        self.num_workers = self.num_shares = num_workers
        self.owned_share = 0
        self.wire = torch.device("cpu")
        self.traffic = Traffic()

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        self.traffic.count_all_reduce(kind, tensor.nbytes, self.num_workers)
        tensor.mul_(self.num_workers)

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        self.traffic.count_all_gather(kind, frame.nbytes, self.num_workers)
        room = torch.empty(
            (self.num_workers, frame.numel()), dtype=frame.dtype, device=frame.device, pin_memory=frame.is_pinned()
        )
        return room.copy_(frame)

    def all_to_all(self, rows: Tensor, kind: str) -> Tensor:
        self.traffic.count_all_to_all(kind, rows.nbytes, self.num_workers)
        return rows

    def broadcast(self, frame: Tensor | None, speaker: int, longest: int) -> Tensor:
        assert frame is not None
        return frame

    def push(self, push: Push) -> dict[int, Tensor]:
        raise AssertionError("owners are not measured here")

    def pull(self, push: Push, own: Tensor | None) -> list[Tensor]:
        raise AssertionError("owners are not measured here")

    def sendrecv(self, frame: Tensor, peer: int, kind: str, num_back: int) -> Tensor:
        return frame
