"""Gossip without a barrier: ask a peer, train on, and move when the answer comes; answer whoever asks."""

import atexit
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import FrameError, PeerError
from laconic.exchange import neighbours, pick
from laconic.replicas.gossip.messages import check_finite, refusal
from laconic.replicas.gossip.side import Side
from laconic.replicas.gossip.vector import Topic
from laconic.replicas.gossip.wait_budget import WaitBudget
from laconic.transport import Mailbox, say

_Question = tuple[int, int, list[int]]  # whom, at which turn, of what


@dataclass(eq=False)
class Free(Side):
    """One worker's side: `step` in the training thread, one thread that asks, and the mailbox's.

    The asking thread stays: a new one each time would touch 4,000 new pages to choose among 1.2 M entries, a quarter of
    the exchange. While a late answer holds it up, another asks in its place.

    Only the training thread writes to the model, between its steps. Exchanges leave what they owe in a vector; what a
    peer is told of a model that is being stepped may be half old, half new, and the sum over both ends is still
    unchanged, because both move by what was told.
    """

    end: Mailbox

    def __post_init__(self) -> None:
        super().__post_init__()
        vector = self.vector
        self._reachable = set(neighbours(self.pattern.peers, self.end.rank, self.end.num_workers))
        self._lock = threading.Lock()
        self._num_sent = 0  # entries that left this worker since the last step
        self._asking: dict[int, tuple[threading.Event, float]] = {}  # peer -> (set when it is over, since when)
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._askers: list[threading.Thread] = []
        self._suspended: set[int] = set()
        self._wait_budget = WaitBudget(self.pattern)
        self._complained_of: set[int] = set()
        self._due: set[int] = set()  # groups that wait until they may speak
        self._failed: Exception | None = None  # what no thread but the training one can end a worker with
        on_cuda = vector.device.type == "cuda"
        self._stream = torch.cuda.Stream(vector.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._catch_up()
        self._closed = False
        atexit.register(self.close)  # threads that outlive the interpreter by a moment would abort the process
        self.end.listen(self._serve, self._served)

    def step(self, step: int, lr: float) -> None:
        """Move by what is owed, and talk; raises what went wrong in another thread."""
        if self._failed is not None:
            raise self._failed
        self._wait_budget.note_trained_()
        self._apply()
        self._talk(step, lr)
        self._wait_budget.note_training_()

    def _talk(self, step: int, lr: float) -> None:
        """Ask somebody if there is something to say and nobody is being asked."""
        self._due |= set(self.tracker.wants(step, lr, patiently=False, held_up=bool(self._due)))
        if not self._count_asking() and self._due:
            peer = pick(self._reachable - set(self._asking), self.pattern.seed, step, self.end.rank)
            if peer is not None:
                groups = sorted(self._due)
                self._due = set()
                self._catch_up()
                self._wait(peer, self._begin(peer, step, groups))

    def _begin(self, peer: int, turn: int, groups: list[int]) -> threading.Event:
        """Let a thread ask about these groups; the event is set when that is over."""
        over = threading.Event()
        with self._lock:
            self._asking[peer] = (over, time.monotonic())
            num_asking = len(self._asking)
        self._questions.put((peer, turn, groups))
        self._askers = [asker for asker in self._askers if asker.is_alive()]
        if num_asking > len(self._askers):
            self._askers.append(threading.Thread(target=self._ask_on, name="laconic-ask", daemon=True))
            self._askers[-1].start()
        return over

    def _wait(self, peer: int, *over: threading.Event) -> None:
        """Wait for a peer while there is time for it, and move by what came of it."""
        self._wait_budget.wait(peer, over)
        self._apply()

    def _count_asking(self) -> int:
        """The answers that are still waited for; one that takes longer than the patience is late, and no longer is."""
        now = time.monotonic()
        with self._lock:
            asking = dict(self._asking)
        slow = {peer for peer, (_, since) in asking.items() if now - since > self.pattern.patience}
        self.late += len(slow - self._suspended)
        self._suspended = slow
        return len(asking) - len(slow)

    def _ask_on(self) -> None:
        """One question after the other."""
        while question := self._questions.get():
            try:
                self._ask(*question)
            except Exception as error:
                self._failed = error

    def _ask(self, peer: int, turn: int, groups: list[int]) -> None:
        """i sends x_i, hears x_j, and owes itself (x_j - x_i as sent)/2."""
        since = time.monotonic()
        try:
            with self._beside_training():
                with self._lock:
                    about = self.messages.about(groups)
                    question = self.messages.ask_(about, check_finite(about.read(self._owed)))
                said = _on_host(question.message)
            reply = self.end.ask(peer, turn, said, self.messages.answer_bytes(groups))
            with self._beside_training():
                heard = reply.to(self.vector.device)
                with self._lock:
                    way = self.messages.settle_(question, heard, peer)
                    self.asked += 1
                    self._owe(question.topic, way)
                    self._wait_budget.note_exchanged_(time.monotonic() - since)
        except FrameError as error:
            self._refused(peer, error)
        except PeerError as error:
            self._drop(peer, str(error))
        finally:
            with self._lock:
                over, _ = self._asking.pop(peer)
            over.set()

    def _serve(self, peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
        try:
            with self._beside_training():
                return _on_host(self._answer(peer, turn, message.to(self.vector.device), num_bytes))
        except Exception as error:
            self._failed = error
            raise

    def _served(self, peer: int, turn: int) -> None:
        """An answer has left."""

    def _answer(self, peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
        """j hears of x_i, owes itself (x_i - x_j)/2, and tells of x_j: its model with all that is owed."""
        try:
            topic, told = self.messages.open(message, peer)
        except FrameError as error:
            self._refused(peer, error)
            return refusal(num_bytes)
        with self._lock:
            answer, way = self.messages.reply_(topic, told, topic.read(self._owed))
            if way is not None:
                self.answered += 1
                self._owe(topic, way)
        return answer

    def _owe(self, topic: Topic, way: Tensor) -> None:
        self._owed.add_(topic, way)
        self._num_sent += topic.num_entries

    def _apply(self) -> None:
        """x += what is owed; in the training thread, between its steps."""
        with self._lock:
            if self._owed.groups:
                if self.tracker.looks:
                    self._due -= self._owed.groups
                with self._after_exchanges():
                    self.move_()
            self.tracker.note_sent_(self._num_sent)
            self._num_sent = 0

    def _catch_up(self) -> None:
        """What is read next is the model after all that this thread has told the device to do."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.vector.device))

    @contextmanager
    def _after_exchanges(self) -> Iterator[None]:
        """In the training thread: after all that exchanges have told the device to do, and before what comes next."""
        if self._stream is not None:
            torch.cuda.current_stream(self.vector.device).wait_stream(self._stream)
        yield
        self._catch_up()

    @contextmanager
    def _beside_training(self) -> Iterator[None]:
        """On CUDA by a stream of our own, so that nothing here waits for training but what reads its model."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.vector.device), torch.cuda.stream(self._stream):
            yield

    def _refused(self, peer: int, error: FrameError) -> None:
        self.refused += 1
        if peer not in self._complained_of:
            self._complained_of.add(peer)
            say(self.end.rank, f"exchanges with rank {peer} are left out while {error}")

    def _drop(self, peer: int, why: str) -> None:
        if self._closed:
            return
        self._reachable.discard(peer)
        self.lost[peer] = why
        say(self.end.rank, f"{why}; going on without it")

    def settle(self) -> None:
        """Wait until nothing is under way anywhere, and move by what is owed; a call that all workers make."""
        for over, _ in list(self._asking.values()):
            over.wait()
        mine = torch.tensor([self.end.rank])
        there = self.end.combine_all(mine, torch.cat, None)  # from here on nobody asks
        for peer in set(range(self.end.num_workers)) - set(there.tolist()) - set(self.lost):
            self._drop(peer, f"rank {peer} is gone")
        self._apply()

    def mean(self, mine: Tensor, kind: str | None) -> Tensor:
        """The mean over all that are alive."""
        return self.end.combine_all(mine.cpu(), _mean, kind).to(mine.device)

    def gather(self, mine: Tensor) -> Tensor:
        """Those of all that are alive, in rank order; not counted."""
        return self.end.combine_all(mine.cpu(), torch.stack, None).view(-1, mine.numel())

    @property
    def owed(self) -> Tensor | None:
        with self._lock, self._after_exchanges():
            return self._owed.read()

    def owe(self, owed: Tensor | None) -> None:
        """Take over what was owed when a state was saved."""
        with self._lock, self._after_exchanges():
            self._owed.write_(owed)

    def note_all_said_(self) -> None:
        with self._lock, self._after_exchanges():
            super().note_all_said_()

    def close(self) -> None:
        """Hang up, after what is under way, if it does not take too long."""
        atexit.unregister(self.close)
        for _ in self._askers:
            self._questions.put(None)
        for asker in self._askers:
            asker.join(self.pattern.patience)
        self._closed = True
        self.end.close()
        for asker in self._askers:
            asker.join(self.pattern.patience)


def _on_host(message: Tensor) -> Tensor:
    """The message where mailboxes take it from, and all that this stream has been told to do is done."""
    if message.device.type == "cpu":
        return message
    host = torch.empty(message.shape, dtype=message.dtype, pin_memory=True)
    host.copy_(message, non_blocking=True)
    torch.cuda.current_stream(message.device).synchronize()
    return host


def _mean(parts: list[Tensor]) -> Tensor:
    """Over those that are finite, if any is: one worker's model that is lost does not take the others with it."""
    sound = [part for part in parts if bool(part.isfinite().all())] or parts
    total = torch.zeros_like(parts[0], dtype=torch.float64)
    for part in sound:
        total += part
    return (total / len(sound)).to(parts[0].dtype)
