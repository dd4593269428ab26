"""Train alone, and agree now and then on where to go: the exchange runs while training goes on."""

import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.futures import Future

from laconic import kernels
from laconic.errors import LaconicError, PeerError, StateError
from laconic.layout import Bucket, local
from laconic.replicas.outer import state
from laconic.replicas.outer.fragments import Buffers, Fragment, Share, fragments_of, trained_of
from laconic.replicas.outer.stats import OuterStats
from laconic.replicas.outer.turn import Turn
from laconic.scheme import OuterScheme
from laconic.server.client import ServerClient
from laconic.session import PHASES, Background, OnDrift, Replicas, SavedTogether, Session
from laconic.session.overflow import TOO_LARGE
from laconic.transport import Collectives, ring_bytes, rows_of

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


class OuterFollower(SavedTogether):
    """One worker that trains alone and takes part in rounds; call `step()` after each `optimizer.step()`.

    `within` joins the processes of a node, whose models are the same: each exchanges its share with its counterparts in
    other nodes, over `transport`, and passes on what it heard. Anchor, outer momentum and what is kept lie at `home`,
    beside the model if none is given. Of a model in shards this worker has the one with this number.

    The clock counts calls of `step()`, which all workers make equally often. Every worker's result is applied after the
    same step, waiting for it if need be, so a run can be had again bit for bit, in the background or not.

    After every `drift_every`-th turn eight bytes of all anchors are compared, but in pairs, where each has its own;
    where they differ, `on_drift` says what that is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheme: OuterScheme,
        transport: Collectives | ServerClient,
        *,
        outer: MakeOptimizer | None = None,
        within: Collectives | None = None,
        home: torch.device | None = None,
        shard: int = 0,
        in_background: bool = True,
        on_drift: OnDrift = "warn",
        drift_every: int = 100,
    ) -> None:
        self.scheme = scheme
        self.rank = transport.rank
        self.num_workers = transport.num_workers
        self._model = model
        self._inner = optimizer
        self._transport = transport
        self._within = within
        self._shard = shard if within is None else within.rank
        self._share = Share() if within is None else Share(within.rank, within.num_workers)
        self._fragments = fragments_of(model, scheme.when.fragments, home, self._share)
        anchors = [anchor for fragment in self._fragments.values() for anchor in fragment.anchors]
        self._device = anchors[0].device
        self._buffers = Buffers(model, self._device)
        self._agreed = self._buffers.read()  # what all had after their last turn
        self._optimizer = (outer or scheme.then.optimizer)(anchors)
        # What was kept is as before a turn that is skipped: the drift is told again, since the anchor has not moved.
        self._session = Session(scheme.exchanged, transport, undoes=True)
        every = 0 if scheme.exchange.in_pairs else drift_every
        self._replicas = Replicas(
            dict(zip(self._names, anchors, strict=True)), transport, every=every, on_drift=on_drift
        )
        self._background = Background(self._session, self._device) if in_background else None
        self._under_way: deque[Turn] = deque()
        self._alike = True  # whether all models are known to be the same
        self._steps = 0
        self._first_step = 0
        self._num_turns = 0
        self._skipped = 0
        self._late_turns = 0
        self._seconds = 0.0
        self._waited_s = 0.0
        self._closed = False

    @property
    def outer(self) -> str:
        """The outer optimizer and what it was made with."""
        return repr(self._optimizer)

    @property
    def error(self) -> BaseException | None:
        """What went wrong while training went on."""
        return self._background.error if self._background else None

    def step(self) -> None:
        """Apply what is due, and send the fragments whose turn it is."""
        self._check_open()
        if self.error is not None:
            self._fail()
        start = time.perf_counter()
        self._steps += 1
        self._alike = False
        self._land(self._steps)
        for number in self.scheme.when.fragments_due(self._steps):
            if number in self._fragments:
                self._send(number)
        self._land(self._steps)  # where nobody trains on meanwhile
        self._seconds += time.perf_counter() - start

    def _send(self, number: int) -> None:
        """Let a fragment's drift go; the last one's takes the buffers with it."""
        if len(trained_of(self._model)) != sum(len(fragment.names) for fragment in self._fragments.values()):
            raise StateError("parameters were frozen or unfrozen since follow(); save the state, and follow anew")
        fragment = self._fragments[number]
        now = fragment.read()
        mean = self.scheme.then.contribution(fragment.anchor, fragment.drift(now))
        delay = self.scheme.when.delay_at(self._steps)
        sent = now if delay and self.scheme.when.mix is None else None
        buffers = None
        parts = buckets = fragment.buckets(mean)
        if self._buffers.layout.spans and number == max(self._fragments):
            buffers = self._buffers.read()
            buckets = [Bucket(0, self._buffers.layout, buffers, is_last=not buckets, is_plain=True), *buckets]
        if self._within is not None and not self._is_finite_within(mean, buffers):
            mean.fill_(torch.nan)  # or a share that is finite would keep what is told again, and say it twice
        outcomes = self._exchange(buckets)
        self._under_way.append(Turn(number, self._steps + delay, delay > 0, mean, sent, buffers, parts, outcomes))

    def _is_finite_within(self, mean: Tensor, buffers: Tensor | None) -> bool:
        """Whether no process of this node has anything that its session, or that of another share, takes for Inf."""
        finite = kernels.all_finite(mean, TOO_LARGE) and (buffers is None or kernels.all_finite(buffers))
        spoiled = torch.full((1,), float(not finite), device=self._device)
        assert self._within is not None
        with self._talking():
            self._within.all_reduce_(spoiled, "within")
        return not spoiled.item()

    def _exchange(self, buckets: Sequence[Bucket]) -> list[Future[Tensor]]:
        if self._background is not None:
            return [self._background.submit(bucket) for bucket in buckets]
        for bucket in buckets:
            self._session.exchange_(bucket)
        return []

    def _land(self, step: int) -> None:
        """Apply everything that is due after so many steps, in the order in which it was sent."""
        while self._under_way and self._under_way[0].due <= step:
            turn = self._under_way.popleft()
            start = time.perf_counter()
            self._wait(turn)
            self._waited_s += time.perf_counter() - start
            self._pass_on_(turn)
            self._apply_(turn)
            if self._replicas.are_due():
                self.check_replicas_()

    def check_replicas_(self) -> None:
        """Compare the anchors of all workers now; a call that all make between steps."""
        if self.scheme.exchange.in_pairs:
            return
        self._wait_for_all()
        before = [fragment.anchor.clone() for fragment in self._fragments.values()]
        try:
            with self._talking():
                self._replicas.check_()
        except LaconicError:
            if not self._closed:
                self.close()
            raise
        for fragment, anchor in zip(self._fragments.values(), before, strict=True):
            if not torch.equal(fragment.anchor, anchor):
                fragment.add_(fragment.anchor - anchor)  # the model goes with it: what it drifted stays

    def _wait(self, turn: Turn) -> None:
        with self._talking():
            for outcome in turn.outcomes:
                outcome.wait()
        turn.outcomes = ()
        turn.note_unheard()

    def _wait_for_all(self) -> None:
        """Until nothing is on its way, since two threads must not talk at once; results stay where they are."""
        self._check_open()
        for turn in self._under_way:
            self._wait(turn)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """What goes wrong inside is one line, and ends this worker's part."""
        try:
            yield
        except (RuntimeError, PeerError) as error:
            self._fail(error)

    def _fail(self, seen: BaseException | None = None) -> NoReturn:
        """Raise what went wrong, and hang up, so that those who wait for this worker hear of it too."""
        error = self.error or seen
        assert error is not None
        traceback.clear_frames(error.__traceback__)  # which hold the group, and so its connections
        # As backends tell of a peer that is gone.
        if isinstance(error, RuntimeError | OSError) and not isinstance(error, torch.OutOfMemoryError):
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            error = PeerError(
                f"rank {self.rank} cannot exchange any more: a peer has ended, cannot be reached, or takes another "
                f"number of steps; see what it said ({first:.200})"
            )
        self.close()
        raise error from None

    def _pass_on_(self, turn: Turn) -> None:
        """Put together what the processes of a node heard, each of its share."""
        if self._within is None:
            return
        own = self._fragments[turn.number].own
        turn.mean[: own.start] = 0
        turn.mean[own.stop :] = 0
        if turn.buffers is not None and not kernels.all_finite(turn.buffers):
            turn.mean.fill_(torch.nan)  # so that all processes of the node skip it
        with self._talking():
            self._within.all_reduce_(turn.mean, "within")

    def _apply_(self, turn: Turn) -> None:
        """Move the anchor by what was heard, and the model with it; where that is not finite, neither."""
        fragment = self._fragments[turn.number]
        said = [turn.mean] if turn.buffers is None else [turn.mean, turn.buffers]
        if not all(kernels.all_finite(vector) for vector in said):
            self._skipped += 1
            self._heal_()
            return
        self._num_turns += 1
        self._late_turns += bool(turn.unheard)
        now = fragment.read() if turn.unheard else fragment.anchor
        before = fragment.anchor.clone() if turn.unheard else fragment.anchor
        self._step_anchor_(fragment, turn.mean)
        if turn.sent is not None:
            fragment.add_(fragment.anchor - turn.sent)
        elif turn.is_late and self.scheme.when.mix:
            fragment.mix_(fragment.anchor, self.scheme.when.mix)
        else:
            fragment.write_(fragment.anchor)  # equal on all workers, bit for bit, but for those in pairs
        if turn.unheard:
            moved = fragment.read()
            for start, stop in turn.unheard:  # its drift was not heard, stays as it is, and is told in its next turn
                inside = slice(start, stop)
                moved[inside] = now[inside] + (fragment.anchor[inside] - before[inside])
            fragment.write_(moved)
        if turn.buffers is not None:
            self._buffers.write_(turn.buffers)
            self._agreed = turn.buffers

    def _step_anchor_(self, fragment: Fragment, mean: Tensor) -> None:
        gradient = self.scheme.then.gradient(fragment.anchor, mean)
        for anchor, view in zip(fragment.anchors, fragment.views(gradient), strict=True):
            anchor.grad = view
        self._optimizer.step()
        for anchor in fragment.anchors:
            anchor.grad = None

    def _heal_(self) -> None:
        """Take a model that is not finite back to where all agreed, without what its optimizer keeps of that."""
        spoiled = [f for f in self._fragments.values() if not kernels.all_finite(f.read())]
        for fragment in spoiled:
            fragment.write_(fragment.anchor)
        spoils_buffers = not kernels.all_finite(self._buffers.read())
        if spoils_buffers:
            self._buffers.write_(self._agreed)
        for parameter, kept in list(self._inner.state.items()):
            if any(isinstance(value, Tensor) and not bool(local(value).isfinite().all()) for value in kept.values()):
                del self._inner.state[parameter]
        if spoiled or spoils_buffers:
            warnings.warn(f"the model of rank {self.rank} is not finite; it goes back to the anchor", stacklevel=5)

    def settle(self) -> None:
        """Wait until nothing is under way, and apply it now; a call that all workers make."""
        self._check_open()
        for turn in self._under_way:
            turn.due = self._steps
        self._land(self._steps)

    def average_(self) -> None:
        """Give every worker the mean of all models, which is the new anchor; a call that all make."""
        self.settle()
        self._check_steps()
        mean = self._mean("average")
        if not kernels.all_finite(mean):  # as all see alike
            self._heal_()
            mean = self._mean("average")
        self.write_(mean)
        start = 0
        for fragment in self._fragments.values():
            fragment.anchor.copy_(mean[start : start + fragment.num_entries])
            start += fragment.num_entries
        self._agreed = mean[start:]
        self._alike = True

    def _check_steps(self) -> None:
        """An error where some worker has not made as many steps, before one sum is taken for another."""
        steps = [round(row[0]) for row in self.gather([self._steps])]
        if len(set(steps)) > 1:
            self.close()
            raise PeerError(f"workers made {', '.join(map(str, steps))} steps, by rank; let all make equally many")

    def consensus(self) -> tuple[Tensor, float]:
        """(the mean of all models as one vector, this one's distance to it over its norm); a call that all make.

        It serves measuring: nothing of it is counted or changes a model.
        """
        self._check_open()
        if self._alike:
            return self.read(), 0.0
        self._wait_for_all()
        self._check_steps()
        with self._transport.traffic.uncounted():
            mean = self._mean("measured")
        distance = (self.read() - mean).double().norm() / mean.double().norm()
        return mean, float(distance)

    def _mean(self, kind: str) -> Tensor:
        total = self.read()
        with self._talking():
            self._transport.all_reduce_(total, kind)
        return total.div_(self.num_workers)

    def read(self) -> Tensor:
        """The model as one vector, buffers of norms included."""
        return torch.cat([*(fragment.read() for fragment in self._fragments.values()), self._buffers.read()])

    def write_(self, values: Tensor) -> None:
        """Overwrite the model with a vector like that of `read`."""
        start = 0
        for fragment in self._fragments.values():
            fragment.write_(values[start : start + fragment.num_entries])
            start += fragment.num_entries
        self._buffers.write_(values[start:])

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The same numbers of all workers that are there, in rank order; a call that all of those make."""
        self._wait_for_all()
        with self._talking():
            if isinstance(self._transport, ServerClient):
                return rows_of(self._transport, values)
            mine = torch.tensor(values, dtype=torch.float64, device=self._device)
            with self._transport.traffic.uncounted():
                rows = self._transport.all_gather(mine, "measured")
        found: list[list[float]] = rows.tolist()
        return found

    def server_stats(self) -> list[dict[str, Any]]:
        """What each dedicated server counted so far; a call that all make."""
        self._wait_for_all()
        return self._transport.server_stats() if isinstance(self._transport, ServerClient) else []

    def stats(self, *, ages: bool = False) -> OuterStats:
        """Bytes out and in, by kind; turns; what the training thread spent, and what passed in the background."""
        said = self._session.stats(ages=ages)
        num_entries = sum(fragment.num_entries for fragment in self._fragments.values())
        dense = ring_bytes(4 * num_entries, self.num_workers) * (self._steps - self._first_step)
        own = {
            "scheme": str(self.scheme),
            "kernels": kernels.backend(self._device),
            "steps": self._steps,
            "first_step": self._first_step,
            "skipped_steps": self._skipped,
            "dense_bytes_out": dense,
            "seconds": {**dict.fromkeys(PHASES, 0.0), "exchange": self._seconds},
        }
        rounds = {"turns": self._num_turns, "late_rounds": self._late_turns}
        times = {"waited_s": self._waited_s, "background_s": said.seconds}
        return OuterStats(**{**vars(said), **own, **rounds, **times})

    def state_dict(self) -> dict[str, Any]:
        """This worker's state as plain tensors and numbers, to be saved per rank beside its model and optimizer.

        What is under way is waited for and saved with it, to be applied when it is due.
        """
        self._wait_for_all()
        progress = state.Progress(self._steps, self._num_turns, self._skipped, self._late_turns)
        return {
            **state.save(self.scheme, self.rank, self.num_workers, self._shard, progress),
            "anchor": self._named(lambda fragment: fragment.anchor),
            "buffers": self._agreed.to("cpu", copy=True),
            "outer": state.save_optimizer(self._optimizer, self._names),
            "session": self._session.state_dict(),
            "under_way": [turn.state_dict() for turn in self._under_way],
        }

    @property
    def _names(self) -> list[str]:
        return [name for fragment in self._fragments.values() for name in fragment.names]

    def _named(self, flat_of: Callable[[Fragment], Tensor]) -> dict[str, Tensor]:
        return {
            name: view.to("cpu", copy=True)
            for fragment in self._fragments.values()
            for name, view in zip(fragment.names, fragment.views(flat_of(fragment)), strict=True)
        }

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from this rank's state, or from the list of all ranks' states; before any rank steps.

        Among another number of workers anchor and outer momentum go on, in pairs each rank's own and the first one's
        for whoever is new, and so does the sum of what was kept.
        """
        states, own, progress = state.load(saved, self.scheme, self.rank, self.num_workers, self._shard)
        shapes = {name: anchor.shape for name, anchor in self._named(lambda fragment: fragment.anchor).items()}
        if {name: anchor.shape for name, anchor in own["anchor"].items()} != shapes:
            raise StateError("the state is of another model; load the state of the same model")
        for fragment in self._fragments.values():
            for name, anchor in zip(fragment.names, fragment.anchors, strict=True):
                anchor.copy_(own["anchor"][name])
        self._agreed = own["buffers"].to(self._device)
        state.load_optimizer(self._optimizer, self._names, own["outer"])
        self._session.load_state_dict([each["session"] for each in states])
        self._steps = self._first_step = progress.steps
        self._alike = False
        self._num_turns = progress.turns
        self._skipped = progress.skipped
        self._late_turns = progress.late
        self._under_way = deque(Turn.of(turn, self._device) for turn in own["under_way"])

    def close(self) -> None:
        """End the thread of exchanges, after what is under way."""
        self._closed = True
        if self._background is not None:
            self._background.close()
        self._transport.close()
        if self._within is not None:
            self._within.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this follower is closed; step and average before close()")
