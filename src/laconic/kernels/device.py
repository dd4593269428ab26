"""Launches that a GPU is told of once and then repeats: to be told of a bucket's forty takes five times as long."""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_CALLS_BEFORE = 3  # of a body as it is, by which its kernels are compiled
_MOST_RECORDINGS = 4  # of one body; where its tensors never stay, it is called as it is


class Recorder:
    """Where the bodies of one station are recorded: a stream that nobody else touches, since who did would spoil it.

    Its recordings are replayed one after the other, and share the memory that they need in between.
    """

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle() if on_cuda else None
        self._latest: torch.cuda.CUDAGraph | None = None  # as memory that no recording uses any more is gone for good

    def record(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """A recording; None, and a warning, where this GPU or its driver cannot."""
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
            warnings.warn(f"launches are not recorded here, so that steps take longer: {why}", stacklevel=2)
            return None
        self._latest = graph
        return graph


class Recorded(Generic[T]):
    """A body that asks nothing of the host and finds its tensors where they were: called, then recorded and replayed.

    It returns nothing, or an object whose attributes are tensors of the same shapes each time. Those lie in the same
    memory after each replay, which no recording has in between: others may be made, or replayed, before they are read.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._key: Hashable = None
        self._num_calls = 0
        self._num_recordings = 0
        self._recording: torch.cuda.CUDAGraph | None = None
        self._result: T

    def run(self, body: Callable[[], T], key: Hashable) -> T:
        """What the body would do; the key says where its tensors are, and all else that it depends on."""
        if key != self._key:
            self._key = key
            self._num_calls = 0
            self._recording = None
        self._num_calls += 1
        if self._num_calls == _CALLS_BEFORE + 1 and self._num_recordings < _MOST_RECORDINGS:
            self._recording = self._recorder.record(lambda: self._keep(body()))
            self._num_recordings += 1
        if self._recording is None:
            self._result = body()
        else:
            self._recording.replay()
        return self._result

    def _keep(self, result: T) -> None:
        """Where the result of the last call lies."""
        for kept, fresh in zip(_tensors_of(self._result), _tensors_of(result), strict=True):
            kept.copy_(fresh)


def _tensors_of(result: object) -> list[Tensor]:
    return [] if result is None else [each for each in vars(result).values() if isinstance(each, Tensor)]
