"""Seconds by phase of a step."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("select", "encode", "exchange", "decode")


class PhaseClock:
    """Seconds per phase, in the threads that exchange; phases of several buckets may pass at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def time(self, phase: str, device: torch.device) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            # Ends the phase for real; it holds up this thread and its own stream, never the backward pass.
            torch.cuda.current_stream(device).synchronize()
        with self._lock:
            self.seconds[phase] += time.perf_counter() - start
