"""Gossip without a barrier: ask a peer, train on, and move when its reply comes; answer whoever asks."""

import atexit
import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import FrameError, PeerError
from laconic.exchange import asks_of, matching, neighbours, pick
from laconic.kernels import to_host
from laconic.replicas.gossip import GossipPolicy
from laconic.replicas.messages import check_finite, refusal
from laconic.replicas.optimizers import Optimizers
from laconic.replicas.policy import State
from laconic.replicas.vector import Subset
from laconic.replicas.wait_budget import WaitBudget
from laconic.scheme import GossipScheme
from laconic.transport import Mailbox, warn

_Exchange = tuple[int, int, list[int]]  # the peer, the number of the step or round, the groups


class FreeGossip(GossipPolicy):
    """Gossip of the modes `free` and `wait`: the training thread, one thread that asks, and the mailbox's.

    The asking thread stays: a new one each time would touch 4,000 new pages to choose among 1.2 M entries, a quarter of
    the exchange. While an overdue reply holds it up, another asks in its place.

    Only the training thread writes to the model, between its steps. Exchanges leave a pending update; what a peer is
    sent of a model that is being stepped may be half old, half new, and the sum over both ends is still unchanged,
    because both move by what was sent.
    """

    end: Mailbox

    def __init__(self, model: nn.Module, optimizer: Optimizers, scheme: GossipScheme, end: Mailbox) -> None:
        super().__init__(model, optimizer, scheme, end)
        self._reachable = set(neighbours(self.pattern.peers, self.end.rank, self.end.num_workers))
        self._lock = threading.RLock()
        self._num_sent = 0  # entries that left this worker since the last step
        self._asking: dict[int, tuple[threading.Event, float]] = {}  # peer -> (set when it is over, since when)
        self._exchanges: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        self._askers: list[threading.Thread] = []
        self._overdue: set[int] = set()
        self._wait_budget = WaitBudget(self.pattern)
        self._complained_of: set[int] = set()
        self._due: set[int] = set()  # groups that wait until they may be exchanged
        on_cuda = self.vector.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.vector.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._catch_up()
        atexit.register(self.close)  # threads that outlive the interpreter by a moment would abort the process
        self.end.listen(self._serve, self._served)

    def exchange_due(self, step: int) -> None:
        self._wait_budget.note_trained_()
        self._exchange(step - 1)
        self._wait_budget.note_training_()

    def _exchange(self, number: int) -> None:
        """Ask somebody if a group is due and nobody is being asked."""
        self._due |= set(self.tracker.wants(number, self._lr, patiently=False, held_up=bool(self._due)))
        if not self._count_asking() and self._due:
            peer = pick(self._reachable - set(self._asking), self.pattern.seed, number, self.rank)
            if peer is not None:
                groups = sorted(self._due)
                self._due = set()
                self._catch_up()
                self._wait(peer, self._begin(peer, number, groups))

    def _begin(self, peer: int, number: int, groups: list[int]) -> threading.Event:
        """Let a thread ask about these groups; the event is set when that is over."""
        over = threading.Event()
        with self._lock:
            self._asking[peer] = (over, time.monotonic())
            num_asking = len(self._asking)
        self._exchanges.put((peer, number, groups))
        self._askers = [asker for asker in self._askers if asker.is_alive()]
        if num_asking > len(self._askers):
            self._askers.append(threading.Thread(target=self._ask_on, name="laconic-ask", daemon=True))
            self._askers[-1].start()
        return over

    def _wait(self, peer: int, *over: threading.Event) -> None:
        """Wait for a peer while there is time for it, and apply what came of it."""
        self._wait_budget.wait(peer, over)
        self._apply_()

    def _count_asking(self) -> int:
        """The number of replies that are waited for; one that takes longer than the patience is overdue, and is not."""
        now = time.monotonic()
        with self._lock:
            asking = dict(self._asking)
        slow = {peer for peer, (_, since) in asking.items() if now - since > self.pattern.patience}
        self.late += len(slow - self._overdue)
        self._overdue = slow
        return len(asking) - len(slow)

    def _ask_on(self) -> None:
        """Make one exchange after the other."""
        while exchange := self._exchanges.get():
            try:
                self._ask(*exchange)
            except Exception as error:
                self.error = error

    def _ask(self, peer: int, number: int, groups: list[int]) -> None:
        """i sends x_i, receives x_j, and is to move by (x_j - x_i as sent)/2."""
        since = time.monotonic()
        try:
            with self._beside_training():
                with self._lock:
                    subset = self.messages.subset(groups)
                    request = self.messages.request_(subset, check_finite(subset.read(self._pending)))
                message = to_host(request.message, non_blocking=False)
            reply = self.end.ask(peer, number, message, self.messages.reply_bytes(groups))
            with self._beside_training():
                received = reply.to(self.vector.device)
                with self._lock:
                    update = self.messages.finish_(request, received, peer)
                    self.num_asked += 1
                    self._note_update_(request.subset, update)
                    self._wait_budget.note_exchanged_(time.monotonic() - since)
        except FrameError as error:
            self._refuse(peer, error)
        except PeerError as error:
            self._drop(peer, str(error))
        finally:
            with self._lock:
                over, _ = self._asking.pop(peer)
            over.set()

    def _serve(self, peer: int, number: int, message: Tensor, num_bytes: int) -> Tensor:
        try:
            with self._beside_training():
                return to_host(self._answer(peer, message.to(self.vector.device), num_bytes), non_blocking=False)
        except Exception as error:
            self.error = error
            raise

    def _served(self, peer: int, number: int) -> None:
        """Note that a reply has left."""

    def _answer(self, peer: int, message: Tensor, num_bytes: int) -> Tensor:
        """j receives x_i, is to move by (x_i - x_j)/2, and sends x_j: its model with the pending update."""
        try:
            subset, received = self.messages.open(message, peer)
        except FrameError as error:
            self._refuse(peer, error)
            return refusal(num_bytes)
        with self._lock:
            reply, update = self.messages.reply_(subset, received, subset.read(self._pending))
            if update is not None:
                self.answered += 1
                self._note_update_(subset, update)
        return reply

    def _note_update_(self, subset: Subset, update: Tensor) -> None:
        self._pending.add_(subset, update)
        self._num_sent += subset.num_entries

    def apply_due_(self, step: int) -> None:
        self._apply_()

    def _apply_(self) -> None:
        """Add the pending update to the model; in the training thread, between its steps."""
        with self._lock:
            if self._pending.groups:
                if self.tracker.measures:
                    self._due -= self._pending.groups
                with self._after_exchanges():
                    self.move_()
            self.tracker.note_sent_(self._num_sent)
            self._num_sent = 0

    def _catch_up(self) -> None:
        """Let exchanges read the model after all that this thread has launched on the device."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.vector.device))

    @contextmanager
    def _after_exchanges(self) -> Iterator[None]:
        """Let the training thread work after all that exchanges have launched, and before what comes next."""
        if self._stream is not None:
            torch.cuda.current_stream(self.vector.device).wait_stream(self._stream)
        yield
        self._catch_up()

    @contextmanager
    def _beside_training(self) -> Iterator[None]:
        """Work on a CUDA stream of our own, so that nothing here waits for training but what reads its model."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.vector.device), torch.cuda.stream(self._stream):
            yield

    def _refuse(self, peer: int, error: FrameError) -> None:
        self.refused += 1
        if peer not in self._complained_of:
            self._complained_of.add(peer)
            warn(self.end.rank, f"exchanges with rank {peer} are left out while {error}")

    def _drop(self, peer: int, why: str) -> None:
        if self.closed:
            return
        self._reachable.discard(peer)
        self.lost[peer] = why
        warn(self.end.rank, f"{why}; going on without it")

    def settle(self, step: int) -> None:
        for over, _ in list(self._asking.values()):
            over.wait()
        own = torch.tensor([self.rank])
        living = self.end.combine_all(own, torch.cat, None)  # from here on nobody asks
        for peer in set(range(self.num_workers)) - set(living.tolist()) - set(self.lost):
            self._drop(peer, f"rank {peer} is gone")
        self._apply_()

    def mean(self, own: Tensor, kind: str | None) -> Tensor:
        return self.end.combine_all(own.cpu(), _mean, kind).to(own.device)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(values, dtype=torch.float64)
        rows: list[list[float]] = self.end.combine_all(own, torch.stack, None).view(-1, own.numel()).tolist()
        return rows

    def state_dict(self) -> dict[str, Any]:
        with self._lock, self._after_exchanges():
            return super().state_dict()

    def load_state_dict(self, states: Sequence[State], own: State | None) -> None:
        with self._lock, self._after_exchanges():
            super().load_state_dict(states, own)

    def note_known_(self) -> None:
        with self._lock, self._after_exchanges():
            super().note_known_()

    def close(self) -> None:
        """Hang up, after exchanges that are in flight, if those do not take too long."""
        atexit.unregister(self.close)
        for _ in self._askers:
            self._exchanges.put(None)
        for asker in self._askers:
            asker.join(self.pattern.patience)
        self.closed = True
        self.end.close()
        for asker in self._askers:
            asker.join(self.pattern.patience)


class PairedGossip(FreeGossip):
    """Gossip by appointment: who meets whom in which round is known to all, and nobody waits for long.

    Rounds are counted by a clock that all workers share, their steps. Each of a pair asks the other about one half of
    the model, both at once, so that the link is busy both ways and neither computes while the other waits. Of a small
    model, and where entries are selected, one of the two asks about everything.

    Who is to be asked waits a moment until its reply has left, so both of a pair move to the middle before they train
    on, and no reply shares a link with the requests of the next round, which makes one pair late for all others. In
    `free` who is asked moves a step later. Who comes late finds a pending update, and who is early is not held up for
    long.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers, scheme: GossipScheme, end: Mailbox) -> None:
        self._last_served: dict[int, float] = {}  # peer -> the last round in which it was answered
        self._expected: dict[int, tuple[int, threading.Event]] = {}  # peer -> (round, set when it was answered)
        super().__init__(model, optimizer, scheme, end)

    def _exchange(self, number: int) -> None:
        """Keep the appointments of this step, one after the other."""
        pattern = self.pattern
        self._count_asking()  # for the stats: an overdue reply keeps a worker from no other appointment
        for pair_round in self.tracker.pair_rounds(number, self._lr):
            partner = matching(pattern.peers, pattern.seed, pair_round, self.num_workers)[self.rank]
            if partner in self._reachable and partner not in self._asking:
                self._meet(partner, pair_round)

    def _meet(self, partner: int, pair_round: int) -> None:
        """Ask about one part of the model and be asked about the other; where there is but one, one of the two asks."""
        groups = list(range(len(self.vector.groups)))
        first = 0 if asks_of(self.pattern.seed, pair_round, self.rank, partner) else 1
        own_groups = groups[first::2]
        peer_groups = groups[1 - first :: 2]
        self._catch_up()  # what either is sent is this step's model
        served = [self._expect(partner, pair_round)] if peer_groups else []
        answered = [self._begin(partner, pair_round, own_groups)] if own_groups else []
        self._wait(partner, *answered, *served)

    def _expect(self, peer: int, pair_round: int) -> threading.Event:
        """An event that is set when the peer has been answered in that round or a later one, or never will."""
        with self._lock:
            served = threading.Event()
            if self._last_served.get(peer, -1) >= pair_round:
                served.set()
            self._expected[peer] = (pair_round, served)
        return served

    def _served(self, peer: int, number: float) -> None:
        """Note that it asked in this round; who has died is as one who has asked in all of them."""
        with self._lock:
            self._last_served[peer] = max(number, self._last_served.get(peer, -1))
            expected, served = self._expected.get(peer, (math.inf, None))
        if served is not None and number >= expected:
            served.set()

    def _drop(self, peer: int, why: str) -> None:
        super()._drop(peer, why)
        self._served(peer, math.inf)

    def load_state_dict(self, states: Sequence[State], own: State | None) -> None:
        super().load_state_dict(states, own)
        with self._lock:
            self._last_served = {}
            self._expected = {}


def _mean(parts: list[Tensor]) -> Tensor:
    """Over those that are finite, if any is: one worker's model that is lost does not take the others with it."""
    sound = [part for part in parts if bool(part.isfinite().all())] or parts
    total = torch.zeros_like(parts[0], dtype=torch.float64)
    for part in sound:
        total += part
    return (total / len(sound)).to(parts[0].dtype)
