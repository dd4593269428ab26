"""The session's threads: buckets are exchanged there while the backward pass goes on."""

import atexit
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.futures import Future

from laconic import kernels
from laconic.errors import LaconicError
from laconic.kernels import give_threads
from laconic.layout import Bucket, Layout
from laconic.session.mismatch import Replicas
from laconic.session.pipeline import Flight, Pipeline
from laconic.session.session import Session

SMALL_MODEL = 1 << 18  # entries; to select among fewer is forty little kernels, and to launch them takes as long
_CLOSE_TIMEOUT_S = 5.0
_NUM_STATIONS = 4  # that compute at once


def belongs_on_host(model: Layout, device: torch.device, wire: torch.device | None) -> bool:
    """Return whether a GPU's gradients are best exchanged on the host, where their messages are written anyway."""
    from_gpu = device.type == "cuda" and wire == torch.device("cpu")
    return from_gpu and model.num_entries <= SMALL_MODEL and kernels.native_on_host()


@dataclass
class _Submission:
    bucket: Bucket
    done: Future[Tensor | BaseException]
    ready: torch.cuda.Event | None  # when the gradient is there, on CUDA

    def land(self, error: BaseException | None) -> None:
        self.done.set_result(error or self.bucket.flat)


_Submissions = queue.SimpleQueue["_Submission | None"]


class Background:
    """Runs a session's exchanges in threads, on CUDA with streams of their own.

    A step of several buckets goes through a pipeline, unless that is not wanted; one of a single bucket has nothing to
    overlap, and stays in one thread. With `on_host` gradients go to the host in one copy, are exchanged there, and what
    was received comes back in another. `replicas` are compared before the last bucket of a step: by then the backward
    pass needs no parameter, and goes on only when that bucket has landed.
    """

    def __init__(
        self,
        session: Session,
        device: torch.device,
        *,
        on_host: bool = False,
        pipelined: bool = True,
        replicas: Replicas | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._session = session
        self._device = device
        self._on_host = on_host
        self._pipelined = pipelined
        self._replicas = replicas
        self._pipeline: Pipeline | None = None  # until a step has two buckets
        self._rooms: dict[tuple[Layout, torch.dtype], Tensor] = {}  # on the host, one for each bucket
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._collected: list[_Submission] = []
        self._step: list[Future[Tensor | BaseException]] = []  # what of the last one that began may be in flight
        self._step_has_begun = False
        self._step_is_whole = True
        self._submissions: _Submissions = queue.SimpleQueue()
        # The thread knows this object weakly, and ends with it: a session that nobody holds must not keep its model.
        self._thread = threading.Thread(
            target=_run, args=(self._submissions, weakref.ref(self)), name="laconic", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._submissions.put, None)
        # A daemon thread that wakes while the interpreter is torn down aborts the process, so it is ended before. One
        # call for all sessions: one for each would stay for as long as the process, with whatever it holds.
        _close_all_at_exit()
        _open.add(self)

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
        """End the threads after what was submitted; one that hangs in a collective is left behind."""
        _open.discard(self)
        self._submissions.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._pipeline is not None:
            self._pipeline.close()

    def take(self, submission: _Submission) -> None:
        """Exchange one bucket, or collect it until its step is whole where the session wants that."""
        with _station(self._device, self._stream):
            if self._step_is_whole:  # a session is in one step at a time, whoever submits the next before it landed
                for done in self._step:
                    done.wait()
                self._step = []
            self._step.append(submission.done)
            self._step_is_whole = submission.bucket.is_last
            if submission.ready is not None:
                torch.cuda.current_stream().wait_event(submission.ready)
            if self._replicas is not None and submission.bucket.is_last and self._replicas.are_due():
                self._check_(self._replicas)
            if self._session.wants_whole_step:
                self._collect(submission)
            elif self._pipelined and (self._step_has_begun or not submission.bucket.is_last):
                self._step_has_begun = not submission.bucket.is_last
                self._begin(submission)
            else:
                self._exchange([submission])

    def _check_(self, replicas: Replicas) -> None:
        """Compare what workers have, when none of this step's buckets is on its way."""
        if not self._session.wants_whole_step:
            if self._pipeline is not None:
                self._pipeline.pause()
            for done in self._step[:-1]:
                done.wait()
        if self.error is None:
            try:
                replicas.check_()
                if self._stream is not None:
                    self._stream.synchronize()  # for whoever uses them next
            except BaseException as error:
                self.error = error

    def _collect(self, submission: _Submission) -> None:
        self._collected.append(submission)
        if submission.bucket.is_last:
            together = self._collected
            self._collected = []
            self._exchange(together)

    def _begin(self, submission: _Submission) -> None:
        """Let a bucket into the pipeline."""
        if self._pipeline is None:
            # On a stream of its own: on this one the next gradient is waited for.
            stream = torch.cuda.Stream(self._device) if self._stream is not None else None  # type: ignore[no-untyped-call]
            self._pipeline = Pipeline(self._session, partial(_station, self._device, stream))
            weakref.finalize(self, self._pipeline.close)
        self.error = self._pipeline.error = self.error or self._pipeline.error
        bucket = self._worked_on(submission.bucket)
        background = weakref.ref(self)  # a bucket that waits keeps nobody

        def land(error: BaseException | None) -> None:
            alive = background()
            if alive is not None:
                if error is None:
                    alive._bring_back(submission.bucket, bucket)
                alive.error = alive.error or error
            submission.land(error)

        self._pipeline.begin(Flight(bucket, land))

    def _exchange(self, submissions: Sequence[_Submission]) -> None:
        """One after the other; after a first failure none is tried again: the workers no longer agree on the order."""
        if self.error is None:
            try:
                buckets = [self._worked_on(submission.bucket) for submission in submissions]
                if self._session.wants_whole_step:
                    self._session.exchange_step_(buckets)
                else:
                    self._session.exchange_(buckets[0])
                for submission, bucket in zip(submissions, buckets, strict=True):
                    self._bring_back(submission.bucket, bucket)
            except BaseException as error:
                self.error = error
        for submission in submissions:
            submission.land(self.error)

    def _worked_on(self, bucket: Bucket) -> Bucket:
        """The bucket where the session works on it."""
        if not self._on_host:
            return bucket
        key = bucket.layout, bucket.flat.dtype
        if key not in self._rooms:
            pinned = self._stream is not None
            self._rooms[key] = torch.empty(bucket.flat.shape, dtype=bucket.flat.dtype, pin_memory=pinned)
        room = self._rooms[key].copy_(bucket.flat, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()  # also over: what was copied back from here a step ago
        return replace(bucket, flat=room)

    def _bring_back(self, bucket: Bucket, result: Bucket) -> None:
        """Copy what the session made of it."""
        if self._on_host:
            bucket.flat.copy_(result.flat, non_blocking=True)


@contextmanager
def _station(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on this device and stream. A phase ends when its stream is through: what one hands on is there for all."""
    if stream is None:
        yield
    else:
        _compute_alone_on_host()
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield


_here = threading.local()
_open: weakref.WeakSet[Background] = weakref.WeakSet()


def _compute_alone_on_host() -> None:
    """Keep this thread's work on the host to itself, for good; other threads notice nothing.

    torch starts a team of threads for each thread that computes there, and those spin for milliseconds: with three
    stages in each of 4 workers on 16 cores an exchange with owners took 12 times its wire.
    """
    if not hasattr(_here, "is_alone"):
        _here.is_alone = True
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        give_threads(max(1, before // _NUM_STATIONS))  # those of native kernels do not spin
        # Threads that torch meets later take the number that was set last, whoever set it.
        restore = threading.Thread(target=torch.set_num_threads, args=(before,))
        restore.start()
        restore.join()


def _run(submissions: _Submissions, background: weakref.ref[Background]) -> None:
    while (submission := submissions.get()) is not None:
        alive = background()
        if alive is None:
            return
        alive.take(submission)
        del alive, submission  # while it waits, the thread holds nothing


@cache
def _close_all_at_exit() -> None:
    atexit.register(_close_all)


def _close_all() -> None:
    for background in list(_open):
        background.close()


def _tensor_or_raise(done: Future[Tensor | BaseException]) -> Tensor:
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value
