"""The session's one thread: buckets are exchanged in order there while the backward pass goes on."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from laconic.layout import Bucket
from laconic.session.session import Session

_CLOSE_TIMEOUT_S = 5.0


@dataclass
class _Errand:
    bucket: Bucket
    done: Future[Tensor | BaseException]
    ready: torch.cuda.Event | None  # when the gradient is there, on CUDA


class Background:
    """Runs a session's exchanges in a thread, on CUDA with a stream of its own."""

    def __init__(self, session: Session, device: torch.device) -> None:
        self.error: BaseException | None = None
        self._session = session
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._errands: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="laconic", daemon=True)
        self._thread.start()
        # A daemon thread that wakes while the interpreter is torn down aborts the process, so it is ended before.
        atexit.register(_close, weakref.ref(self))

    def submit(self, bucket: Bucket) -> Future[Tensor]:
        """Queue a bucket; the future holds its flat buffer once that is the mean, or fails with what went wrong."""
        on_cuda = self._stream is not None
        done: Future[Tensor | BaseException] = Future(devices=[self._device] if on_cuda else None)
        # A future that a callback fails rethrows in the backward pass; one given set_exception() does not.
        outcome: Future[Tensor] = done.then(_tensor_or_raise)
        ready = torch.cuda.current_stream(self._device).record_event() if on_cuda else None
        self._errands.put(_Errand(bucket, done, ready))
        return outcome

    def close(self) -> None:
        """End the thread after the errands it has; one that hangs in a collective is left behind."""
        self._errands.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        if self._stream is None:
            self._serve()
        else:
            torch.cuda.set_device(self._device)
            with torch.cuda.stream(self._stream):
                self._serve()

    def _serve(self) -> None:
        waiting: list[_Errand] = []
        while (errand := self._errands.get()) is not None:
            waiting.append(errand)
            if self._session.wants_whole_step and not errand.bucket.is_last:
                continue
            outcome = self._exchange(waiting)
            for served in waiting:
                served.done.set_result(outcome or served.bucket.flat)
            waiting = []

    def _exchange(self, errands: list[_Errand]) -> BaseException | None:
        """Do the errands; after a first failure none is tried again, since the workers no longer agree on the order."""
        if self.error is None:
            try:
                for errand in errands:
                    if errand.ready is not None:
                        torch.cuda.current_stream().wait_event(errand.ready)
                if self._session.wants_whole_step:
                    self._session.exchange_step_([errand.bucket for errand in errands])
                else:
                    self._session.exchange_(errands[0].bucket)
            except BaseException as error:
                self.error = error
        return self.error


def _close(background: weakref.ref[Background]) -> None:
    alive = background()
    if alive is not None:
        alive.close()


def _tensor_or_raise(done: Future[Tensor | BaseException]) -> Tensor:
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value
