"""The session's one thread: buckets are exchanged in order there while the backward pass goes on."""

import atexit
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.futures import Future

from laconic import kernels
from laconic.errors import LaconicError
from laconic.layout import Bucket, Layout
from laconic.session.session import Session

SMALL_MODEL = 1 << 18  # entries; to choose among fewer is forty little things to do, and telling a GPU takes as long
_CLOSE_TIMEOUT_S = 5.0


def belongs_on_host(model: Layout, device: torch.device, wire: torch.device | None) -> bool:
    """Whether a GPU's gradients are best exchanged on the host, where their messages are written anyway."""
    on_the_way = device.type == "cuda" and wire == torch.device("cpu")
    return on_the_way and model.num_entries <= SMALL_MODEL and kernels.native_on_host()


@dataclass
class _Submission:
    bucket: Bucket
    done: Future[Tensor | BaseException]
    ready: torch.cuda.Event | None  # when the gradient is there, on CUDA


_Submissions = queue.SimpleQueue["_Submission | None"]


class Background:
    """Runs a session's exchanges in a thread, on CUDA with a stream of its own.

    With `on_host` gradients go to the host in one copy, are exchanged there, and what was heard comes back in another.
    """

    def __init__(self, session: Session, device: torch.device, *, on_host: bool = False) -> None:
        self.error: BaseException | None = None
        self._session = session
        self._device = device
        self._on_host = on_host
        self._rooms: dict[tuple[Layout, torch.dtype], Tensor] = {}  # there, one for each bucket
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._waiting: list[_Submission] = []
        self._submissions: _Submissions = queue.SimpleQueue()
        # The thread knows this object weakly, and ends with it: a session that nobody holds must not keep its model.
        self._thread = threading.Thread(
            target=_run, args=(self._submissions, weakref.ref(self)), name="laconic", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._submissions.put, None)
        # A daemon thread that wakes while the interpreter is torn down aborts the process, so it is ended before.
        atexit.register(_close, weakref.ref(self))

    def submit(self, bucket: Bucket) -> Future[Tensor]:
        """Queue a bucket; the future holds its flat buffer once that is the mean, or fails with what went wrong."""
        on_cuda = self._stream is not None
        done: Future[Tensor | BaseException] = Future(devices=[self._device] if on_cuda else None)
        # A future that a callback fails rethrows in the backward pass; one given set_exception() does not.
        outcome: Future[Tensor] = done.then(_tensor_or_raise)
        if not self._thread.is_alive():
            done.set_result(LaconicError("this session is closed; attach to a fresh DistributedDataParallel"))
            return outcome
        ready = torch.cuda.current_stream(self._device).record_event() if on_cuda else None
        self._submissions.put(_Submission(bucket, done, ready))
        return outcome

    def close(self) -> None:
        """End the thread after what was submitted; one that hangs in a collective is left behind."""
        self._submissions.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def take(self, submission: _Submission) -> None:
        """Exchange one bucket, or collect it until its step is whole where the session wants that."""
        self._waiting.append(submission)
        if self._session.wants_whole_step and not submission.bucket.is_last:
            return
        together = self._waiting
        self._waiting = []
        if self._stream is None:
            self._exchange(together)
        else:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._exchange(together)

    def _exchange(self, submissions: list[_Submission]) -> None:
        """Exchange them; after a first failure none is tried again, since the workers no longer agree on the order."""
        if self.error is None:
            try:
                for submission in submissions:
                    if submission.ready is not None:
                        torch.cuda.current_stream().wait_event(submission.ready)
                with self._at_work([submission.bucket for submission in submissions]) as buckets:
                    if self._session.wants_whole_step:
                        self._session.exchange_step_(buckets)
                    else:
                        self._session.exchange_(buckets[0])
            except BaseException as error:
                self.error = error
        for submission in submissions:
            submission.done.set_result(self.error or submission.bucket.flat)

    @contextmanager
    def _at_work(self, buckets: Sequence[Bucket]) -> Iterator[Sequence[Bucket]]:
        """The buckets where the session works on them; what it made of them is theirs on leaving."""
        if not self._on_host:
            yield buckets
            return
        there = [replace(bucket, flat=self._room(bucket)) for bucket in buckets]
        for bucket, copy in zip(buckets, there, strict=True):
            copy.flat.copy_(bucket.flat, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()  # also over: what was copied back from here a step ago
        yield there
        for bucket, copy in zip(buckets, there, strict=True):
            bucket.flat.copy_(copy.flat, non_blocking=True)

    def _room(self, bucket: Bucket) -> Tensor:
        key = bucket.layout, bucket.flat.dtype
        if key not in self._rooms:
            pinned = self._stream is not None
            self._rooms[key] = torch.empty(bucket.flat.shape, dtype=bucket.flat.dtype, pin_memory=pinned)
        return self._rooms[key]


def _run(submissions: _Submissions, background: weakref.ref[Background]) -> None:
    while (submission := submissions.get()) is not None:
        alive = background()
        if alive is None:
            return
        alive.take(submission)
        del alive, submission  # while it waits, the thread holds nothing


def _close(background: weakref.ref[Background]) -> None:
    alive = background()
    if alive is not None:
        alive.close()


def _tensor_or_raise(done: Future[Tensor | BaseException]) -> Tensor:
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value
