"""Between the host and a GPU: copies through pinned memory, and steps whose kernels a CUDA graph replays.

To launch the forty kernels of a bucket takes the host five times as long as to replay them.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

_log = logging.getLogger("laconic.kernels")

T = TypeVar("T")
# Called with its inputs on the device; returns a result that stays there, and the tensors that leave the device.
Body = Callable[..., tuple[T, Sequence[Tensor]]]

_CALLS_BEFORE = 3  # launched calls of a body before it is captured: by then its kernels are compiled
_MOST_CAPTURES = 4  # of one step; a body whose tensors keep moving is launched from then on


def to_host(tensor: Tensor, *, non_blocking: bool = True) -> Tensor:
    """A copy in pinned memory, complete when the stream is unless it blocks; a tensor of the host as it is."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=non_blocking)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, by a copy through pinned memory that the host does not wait for."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for_stream(device: torch.device) -> None:
    """Wait until a GPU's current stream is through; one that is already costs no change of threads."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        if not stream.query():
            stream.synchronize()


class GraphPool:
    """The memory and the stream of CUDA graphs that are replayed one after the other, on one thread.

    The stream is used for nothing else, since other work on it would break a capture. The graphs share the memory that
    they need while they run.
    """

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle() if on_cuda else None
        self._latest: torch.cuda.CUDAGraph | None = None  # a pool that no graph uses loses its memory for good

    def capture(self, body: Callable[[], None]) -> Callable[[], None] | None:
        """What replays the body's kernels; None, and a warning, where this GPU or its driver cannot."""
        if self._stream is None:
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    body()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            _log.warning(f"CUDA graphs cannot be captured here, so that steps take longer: {why}")
            return None
        self._latest = graph
        return graph.replay


class Step(Generic[T]):
    """A part of an exchange whose kernels are launched one by one; its body may ask the host in between."""

    captures = False

    def __init__(self, device: torch.device, wire: torch.device | None) -> None:
        self._device = device
        self._wire = wire

    def run(self, body: Body[T], uses: Sequence[Tensor | float], *inputs: Tensor) -> tuple[T, Sequence[Tensor]]:
        """The body's result, and its outputs where messages are written, there when the stream is through.

        Args:
            body: what to run; it gets the inputs on the device.
            uses: the tensors that the body finds by itself, and the numbers that it depends on.
            inputs: tensors of the host.
        """
        result, outputs = body(*(to_device(each, self._device) for each in inputs))
        leaves = self._wire is not None and self._wire.type == "cpu"
        return result, [to_host(each) for each in outputs] if leaves else outputs


class CapturedStep(Step[T]):
    """A step that is launched a few times, then captured and replayed.

    Its body asks nothing of the host, and depends on nothing but what `run` is told of: a replay calls no Python. Its
    result is None or an object with tensors of the same shapes each time. Those lie outside of the graphs' pool, in the
    same memory after each replay: other graphs may be captured or replayed before they are read.
    """

    captures = True

    def __init__(self, device: torch.device, pool: GraphPool) -> None:
        super().__init__(device, torch.device("cpu"))
        self._pool = pool
        self._key: Hashable = None
        self._num_calls = 0
        self._num_captures = 0
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Tensor] = []  # pinned, as are the outputs
        self._outputs: list[Tensor] = []
        self._result: T

    @property
    def is_replayed(self) -> bool:
        """Return whether a graph has been captured for the tensors of the last run."""
        return self._replay is not None

    def run(self, body: Body[T], uses: Sequence[Tensor | float], *inputs: Tensor) -> tuple[T, Sequence[Tensor]]:
        """The same; the next run overwrites the outputs."""
        self._inputs = self._rooms(self._inputs, inputs)
        for room, given in zip(self._inputs, inputs, strict=True):
            room.copy_(given)
        key = tuple((x.data_ptr(), x.numel()) if isinstance(x, Tensor) else x for x in (*uses, *self._inputs))
        if key != self._key:
            self._key = key
            self._num_calls = 0
            self._replay = None
        self._num_calls += 1
        if self._num_calls == _CALLS_BEFORE + 1 and self._num_captures < _MOST_CAPTURES:
            self._replay = self._pool.capture(lambda: self._keep(self._launch(body)))
            self._num_captures += 1
        if self._replay is None:
            self._result = self._launch(body)
        else:
            self._replay()
        return self._result, self._outputs

    def _launch(self, body: Body[T]) -> T:
        """Run the body between the copies of its inputs and outputs, which are part of what is captured."""
        result, outputs = body(*(room.to(self._device, non_blocking=True, copy=True) for room in self._inputs))
        self._outputs = self._rooms(self._outputs, outputs)
        for room, output in zip(self._outputs, outputs, strict=True):
            room.copy_(output, non_blocking=True)
        return result

    def _rooms(self, rooms: list[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pinned memory for such tensors: that of the last run, if it fits."""
        if [(each.shape, each.dtype) for each in rooms] == [(each.shape, each.dtype) for each in tensors]:
            return rooms
        pinned = self._device.type == "cuda"
        return [torch.empty(each.shape, dtype=each.dtype, pin_memory=pinned) for each in tensors]

    def _keep(self, result: T) -> None:
        """Copy a result of the graphs' pool to where the last launched call's lies."""
        for kept, fresh in zip(_tensors_of(self._result), _tensors_of(result), strict=True):
            kept.copy_(fresh)


def _tensors_of(result: object) -> list[Tensor]:
    return [] if result is None else [each for each in vars(result).values() if isinstance(each, Tensor)]


class Executor:
    """Runs the steps of a path: launched, or captured on a GPU whose messages leave from the host."""

    def __init__(self) -> None:
        self._pools: dict[str, GraphPool] = {}
        self._steps: dict[tuple[str, Hashable], CapturedStep[Any]] = {}
        self._rooms: dict[tuple[int, ...], Tensor] = {}

    def captures(self, tensor: Tensor, wire: torch.device | None) -> bool:
        """Return whether steps on this tensor are captured, if they ask nothing of the host."""
        return tensor.is_cuda and tensor.dtype == torch.float32 and wire is not None and wire.type == "cpu"

    def step(
        self, stage: str, bucket: Hashable, device: torch.device, wire: torch.device | None, *, captures: bool
    ) -> Step[Any]:
        """The step of a bucket at a stage, which buckets pass one after the other."""
        if not captures:
            return Step(device, wire)
        if (stage, bucket) not in self._steps:
            if stage not in self._pools:
                self._pools[stage] = self.new_pool(device)
            self._steps[stage, bucket] = CapturedStep(device, self._pools[stage])
        return self._steps[stage, bucket]

    def new_pool(self, device: torch.device) -> GraphPool:
        """A stage's pool."""
        return GraphPool(device)

    def staged(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor of the host in memory of the device that all of this shape share, for one captured step to read."""
        shape = tuple(tensor.shape)
        if shape not in self._rooms:
            self._rooms[shape] = torch.empty(shape, dtype=tensor.dtype, device=device)
        return self._rooms[shape].copy_(tensor, non_blocking=True)

    @property
    def num_replayed(self) -> int:
        """The captured steps that replay a graph by now."""
        return sum(step.is_replayed for step in self._steps.values())
