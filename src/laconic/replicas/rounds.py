"""Outer rounds: train apart, and agree now and then on where to go, while training goes on."""

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.futures import Future

from laconic import kernels
from laconic.errors import LaconicError, PeerError, StateError
from laconic.layout import Bucket
from laconic.outer import Outer, OuterMomentum
from laconic.replicas.fragments import PendingRound, fragments_of
from laconic.replicas.optimizers import Optimizers, drop_nonfinite_moments_, inner_momentum, listed
from laconic.replicas.policy import Policy, State, on_host
from laconic.replicas.vector import ModelVector
from laconic.scheme import OuterScheme, write_part
from laconic.server.client import ServerClient
from laconic.session import TOO_LARGE, Background, OnMismatch, Replicas, Session
from laconic.transport import Collectives, as_peer_error, rows_of

_log = logging.getLogger("laconic.replicas")

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


class OuterRounds(Policy):
    """One worker's side of outer rounds, among all workers or, where the exchange is Pairs, two at a time.

    Every worker's result is applied after the same step, waiting for it if need be, so a run can be repeated bit for
    bit, in the background or not.

    Args:
        model: The model; of one in shards this worker has the one with the number `shard`.
        optimizer: The one that trains it, or several.
        scheme: How drifts are exchanged, when, and what is done with their mean.
        transport: This worker's end of the network among all workers, or among its counterparts in other nodes.
        outer_optimizer: Makes the outer optimizer from the anchors, instead of the scheme's own.
        node: Joins the processes of a node, whose models are the same: each exchanges its share and passes it on.
        home: Where anchor, outer momentum and residual lie; beside the model if not given.
        shard: The number of this worker's shard.
        in_background: Whether exchanges have a thread of their own.
        on_mismatch: What is done where the workers' anchors differ.
        check_replicas_every: Rounds between two comparisons of all anchors, of eight bytes each; none in pairs.
    """

    scheme: OuterScheme

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        scheme: OuterScheme,
        transport: Collectives | ServerClient,
        *,
        outer_optimizer: MakeOptimizer | None = None,
        node: Collectives | None = None,
        home: torch.device | None = None,
        shard: int = 0,
        in_background: bool = True,
        on_mismatch: OnMismatch = "warn",
        check_replicas_every: int = 100,
    ) -> None:
        self.scheme = scheme
        self.vector = ModelVector(model, only_trained=True)
        self.rank = transport.rank
        self.num_workers = transport.num_workers
        self.num_dense = self.vector.num_trained
        self.shard = shard if node is None else node.rank
        self._then = then = scheme.then.among(self.num_workers)
        self.optimizers = listed(optimizer)
        self._transport = transport
        self._node = node
        self._home = home or self.vector.device
        share, num_shares = (0, 1) if node is None else (node.rank, node.num_workers)
        self.fragments = fragments_of(self.vector, scheme.when.fragments, self._home, share, num_shares)
        self._anchors = {
            name: anchor for fragment in self.fragments.values() for name, anchor in fragment.anchors.items()
        }
        self._agreed = self._read_buffers()  # what all had after their last round
        self._optimizer = (outer_optimizer or then.optimizer)(list(self._anchors.values()))
        self._momenta: dict[int, OuterMomentum] = {}  # by fragment, where they follow from agreement
        for number, fragment in self.fragments.items() if outer_optimizer is None else ():
            momentum = OuterMomentum.of(then, fragment.anchor, scheme.when.every, inner_momentum(optimizer))
            if momentum is not None:
                self._momenta[number] = momentum
        # Residuals are as before a round that is skipped: the drift goes again, since the anchor has not moved.
        self._session = Session(scheme.exchanged, transport, undoes=True)
        every = 0 if scheme.exchange.in_pairs else check_replicas_every
        compared = {**self._anchors, **{f"momentum {n}": momentum.value for n, momentum in self._momenta.items()}}
        self._replicas = Replicas(compared, transport, every=every, on_mismatch=on_mismatch)
        self._background = Background(self._session, self._home) if in_background else None
        self._pending: deque[PendingRound] = deque()
        self._alike = True  # whether all models are known to be the same
        self._num_rounds = 0
        self._num_skipped = 0
        self._num_late = 0
        self._waited_s = 0.0

    @property
    def outer_optimizer(self) -> str:
        """The outer optimizer and what it was made with, which is the same on all ranks."""
        return f"{self._optimizer!r}{[momentum.lag for momentum in self._momenta.values()]}"

    @property
    def error(self) -> BaseException | None:  # type: ignore[override]
        return self._background.error if self._background else None

    def _read_buffers(self) -> Tensor:
        buffers = self.vector.buffers
        return self.vector.read(buffers, out=torch.empty(buffers.num_entries, device=self._home))

    def raise_error(self) -> None:
        if self.error is not None:
            self._fail()

    def rehearse(self) -> None:
        """Exchange zeros of every fragment once, as its rounds will: kernels compile, and connections open.

        On a GPU the first rounds would otherwise stall training for seconds. Nothing of it is counted or kept, since
        its session is another one; a call that all workers make, before any of them steps.
        """
        start = time.perf_counter()
        rehearsed = Background(Session(self.scheme.exchanged, self._transport, undoes=True), self._home)
        with self._transport.traffic.uncounted(), self._exchanging():
            for fragment in self.fragments.values():
                zeros = torch.zeros_like(fragment.anchor)
                for outcome in [rehearsed.submit(bucket) for bucket in fragment.buckets(zeros)]:
                    outcome.wait()
                if kernels.all_finite(zeros):
                    self.vector.add_(zeros, fragment.part)
        rehearsed.close()
        torch.cuda.empty_cache()  # of streams that are gone
        _log.info(f"rank {self.rank} compiled kernels and opened connections in {time.perf_counter() - start:.1f} s")

    def send_due(self, step: int) -> None:
        """Send the drifts of the fragments that are due."""
        self._alike = False
        for number in self.scheme.when.fragments_due(step):
            if number in self.fragments:
                self._send(number, step)

    def _send(self, number: int, step: int) -> None:
        """Send a fragment's drift; the last one's takes the buffers with it."""
        if not self.vector.is_complete():
            raise StateError("parameters were frozen or unfrozen since follow(); save the state, and follow anew")
        fragment = self.fragments[number]
        when = self.scheme.when
        now = fragment.read()
        mean = self._outer_step(step).contribution(fragment.anchor, fragment.drift(now))
        delay = when.delay_at(step)
        sent = now if delay and when.mix is None else None
        buffers = None
        parts = buckets = fragment.buckets(mean)
        if self._agreed.numel() and number == max(self.fragments):
            buffers = self._read_buffers()
            layout = self.vector.layout_of(self.vector.buffers)
            buckets = [Bucket(0, layout, buffers, is_last=not buckets, is_plain=True), *buckets]
        if self._node is not None and not self._is_finite_in_node(mean, buffers):
            mean.fill_(torch.nan)  # or a share that is finite would keep what goes again, and send it twice
        outcomes = self._exchange(buckets)
        self._pending.append(PendingRound(number, step + delay, delay > 0, mean, sent, buffers, parts, outcomes))

    def _is_finite_in_node(self, mean: Tensor, buffers: Tensor | None) -> bool:
        """Whether no process of this node has anything that its session, or that of another share, takes for Inf."""
        finite = kernels.all_finite(mean, TOO_LARGE) and (buffers is None or kernels.all_finite(buffers))
        nonfinite = torch.full((1,), float(not finite), device=self._home)
        assert self._node is not None
        with self._exchanging():
            self._node.all_reduce_(nonfinite, "within")
        return not nonfinite.item()

    def _exchange(self, buckets: Sequence[Bucket]) -> list[Future[Tensor]]:
        if self._background is not None:
            return [self._background.submit(bucket) for bucket in buckets]
        for bucket in buckets:
            self._session.exchange_(bucket)
        return []

    def apply_due_(self, step: int) -> None:
        """Apply every result that is due after so many steps, in the order in which the drifts were sent."""
        while self._pending and self._pending[0].due <= step:
            result = self._pending.popleft()
            start = time.perf_counter()
            with self._exchanging():
                result.wait()
            self._waited_s += time.perf_counter() - start
            self._join_shares_(result)
            self._apply_(result)
            if self._replicas.are_due():
                self.check_replicas_()

    def check_replicas_(self) -> None:
        if self.scheme.exchange.in_pairs:
            return
        self._wait_for_all()
        before = [fragment.anchor.clone() for fragment in self.fragments.values()]
        try:
            with self._exchanging():
                self._replicas.check_()
        except LaconicError:
            if not self.closed:
                self.close()
            raise
        for fragment, anchor in zip(self.fragments.values(), before, strict=True):
            if not torch.equal(fragment.anchor, anchor):
                self.vector.add_(fragment.anchor - anchor, fragment.part)  # the model goes with it: its drift stays

    def _wait_for_all(self) -> None:
        """Wait until nothing is in flight, since two threads must not send at once; results stay where they are."""
        with self._exchanging():
            for result in self._pending:
                result.wait()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Turn what goes wrong inside into one line, which ends this worker's part."""
        if self.closed:
            raise StateError("this follower is closed; step and average before close()")
        try:
            yield
        except (RuntimeError, PeerError) as error:
            self._fail(error)

    def _fail(self, seen: BaseException | None = None) -> NoReturn:
        """Raise what went wrong, and hang up, so that those who wait for this worker are told too."""
        error = self.error or seen
        assert error is not None
        traceback.clear_frames(error.__traceback__)  # which hold the group, and so its connections
        cause = "a peer has ended, cannot be reached, or takes another number of steps; see what it said"
        self.close()
        raise as_peer_error(error, self.rank, cause) from None

    def _join_shares_(self, result: PendingRound) -> None:
        """Put together what the processes of a node received, each of its share."""
        if self._node is None:
            return
        own = self.fragments[result.fragment].own
        result.mean[: own.start] = 0
        result.mean[own.stop :] = 0
        if result.buffers is not None and not kernels.all_finite(result.buffers):
            result.mean.fill_(torch.nan)  # so that all processes of the node skip it
        with self._exchanging():
            self._node.all_reduce_(result.mean, "within")

    def _apply_(self, result: PendingRound) -> None:
        """Move the anchor by the mean, and the model with it; where the mean is not finite, neither."""
        fragment = self.fragments[result.fragment]
        vectors = [result.mean] if result.buffers is None else [result.mean, result.buffers]
        if not all(kernels.all_finite(vector) for vector in vectors):
            self._num_skipped += 1
            self._heal_()
            return
        self._num_rounds += 1
        self._num_late += bool(result.missed)
        now = fragment.read() if result.missed else fragment.anchor
        before = fragment.anchor.clone() if result.missed else fragment.anchor
        self._step_anchor_(result)
        if result.sent is not None:
            self.vector.add_(fragment.anchor - result.sent, fragment.part)
        elif result.is_delayed and self.scheme.when.mix:
            self.vector.mix_(fragment.anchor, self.scheme.when.mix, fragment.part)
        else:
            self.vector.write_(fragment.anchor, fragment.part)  # equal on all workers, but for those in pairs
        if result.missed:
            moved = fragment.read()
            for start, stop in result.missed:  # its drift came too late, stays as it is, and goes in its next round
                inside = slice(start, stop)
                moved[inside] = now[inside] + (fragment.anchor[inside] - before[inside])
            self.vector.write_(moved, fragment.part)
        if result.buffers is not None:
            self.vector.write_(result.buffers, self.vector.buffers)
            self._agreed = result.buffers
        if result.missed and not kernels.all_finite(moved):
            self._heal_()  # now, since the others skip no round for a drift that never comes in time

    def _outer_step(self, step: int) -> Outer:
        """The outer step of a round whose result is applied then; a warm-up averages, whatever the optimizer.

        Rounds of one step would otherwise add up in its momentum: an outer 0.7 / 0.9 goes seven times as far.
        """
        return self._then.averaging() if step <= self.scheme.when.warmup else self._then

    def _step_anchor_(self, result: PendingRound) -> None:
        fragment = self.fragments[result.fragment]
        gradient = self._outer_step(result.due).gradient(fragment.anchor, result.mean)
        if result.due <= self.scheme.when.warmup:
            fragment.anchor.sub_(gradient)
            return
        if momentum := self._momenta.get(result.fragment):
            self._optimizer.param_groups[0]["momentum"] = momentum.adapt_(gradient, fragment.anchor)
        for name, view in fragment.views(gradient).items():
            fragment.anchors[name].grad = view
        self._optimizer.step()
        for anchor in fragment.anchors.values():
            anchor.grad = None

    def _heal_(self) -> None:
        """Take a model that is not finite back to where all agreed, without what its optimizer keeps of that."""
        nonfinite = [fragment for fragment in self.fragments.values() if not kernels.all_finite(fragment.read())]
        for fragment in nonfinite:
            self.vector.write_(fragment.anchor, fragment.part)
        has_bad_buffers = not kernels.all_finite(self._read_buffers())
        if has_bad_buffers:
            self.vector.write_(self._agreed, self.vector.buffers)
        drop_nonfinite_moments_(self.optimizers)
        if nonfinite or has_bad_buffers:
            _log.warning(f"the model of rank {self.rank} is not finite; it goes back to the anchor")

    def settle(self, step: int) -> None:
        for result in self._pending:
            result.due = step
        self.apply_due_(step)

    def average_(self, step: int) -> None:
        """Give every worker the mean of all models, which is the new anchor."""
        self.settle(step)
        self._check_steps(step)
        mean = self._mean("average")
        if not kernels.all_finite(mean):  # as all see alike
            self._heal_()
            mean = self._mean("average")
        self.vector.write_(mean)
        for fragment in self.fragments.values():
            fragment.anchor.copy_(mean[fragment.part.start : fragment.part.stop])
        self._agreed = mean[self.vector.buffers.start :]
        self._alike = True

    def _check_steps(self, step: int) -> None:
        """PeerError where some worker has not made as many steps, before one sum is taken for another."""
        steps = [round(row[0]) for row in self.gather([step])]
        if len(set(steps)) > 1:
            self.close()
            raise PeerError(f"workers made {', '.join(map(str, steps))} steps, by rank; let all make equally many")

    def measured_mean(self, step: int) -> Tensor:
        if self._alike:
            return self.vector.read()
        self._wait_for_all()
        self._check_steps(step)
        with self._transport.traffic.uncounted():
            return self._mean("measured")

    def _mean(self, kind: str) -> Tensor:
        total = self.vector.read().to(self._home)
        with self._exchanging():
            self._transport.all_reduce_(total, kind)
        return total.div_(self.num_workers)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        self._wait_for_all()
        with self._exchanging():
            return rows_of(self._transport, values)

    def server_stats(self) -> list[dict[str, Any]]:
        self._wait_for_all()
        return self._transport.server_stats()

    def stats(self, num_steps: int, *, ages: bool) -> dict[str, Any]:
        session = self._session.stats(ages=ages)
        return {
            **vars(session),
            "skipped_steps": self._num_skipped,
            "rounds": self._num_rounds,
            "late_rounds": self._num_late,
            "waited_s": self._waited_s,
            "background_s": session.seconds,
            "momentum": self._momentum(),
        }

    def _momentum(self) -> float | None:
        """The outer momentum, in the mean over fragments; None of an optimizer that has another kind of it."""
        if self._momenta:
            return sum(float(momentum.value) for momentum in self._momenta.values()) / len(self._momenta)
        return self._optimizer.param_groups[0].get("momentum")

    def totals(self) -> dict[str, float]:
        counted = {"rounds": self._num_rounds, "skipped": self._num_skipped, "waited_ms": 1e3 * self._waited_s}
        return {**self._session.totals(), **counted}

    @property
    def num_members(self) -> int:
        return self._session.transport.num_living

    def state_dict(self) -> dict[str, Any]:
        self._wait_for_all()
        return {
            "trigger": write_part("trigger", self.scheme.when),
            "rounds": self._num_rounds,
            "skipped": self._num_skipped,
            "late_rounds": self._num_late,
            "anchor": on_host(self._anchors),
            "buffers": on_host(self._agreed),
            "outer": on_host(self._optimizer.state_dict()),  # by place, which is that of the anchors
            "momenta": {number: momentum.state_dict() for number, momentum in self._momenta.items()},
            "session": self._session.state_dict(),
            "pending": [result.state_dict() for result in self._pending],
        }

    def load_state_dict(self, states: Sequence[State], own: State | None) -> None:
        """Go on from this rank's state, or from the first one's where the number of workers is another one.

        Then anchor and outer momentum go on, in pairs each rank's own, and so does the sum of all residuals.
        """
        if len({(state["step"], state["num_workers"]) for state in states}) > 1:
            raise StateError("the states are of different steps; load states that were saved together")
        num_saved = states[0]["num_workers"]
        if num_saved != self.num_workers and len(states) != num_saved:
            raise StateError(
                f"the state is of one of {num_saved} workers, now there are {self.num_workers}; give load_state_dict a "
                f"list of all {num_saved} states"
            )
        if own is None and num_saved == self.num_workers:
            raise StateError(f"no state of rank {self.rank} is among those given; load what this rank saved")
        own = own or states[0]
        if "anchor" not in own:
            raise StateError(f"the state is of {own['scheme']}; resume with that scheme")
        if own["pending"] and own["trigger"] != write_part("trigger", self.scheme.when):
            raise StateError(f"results of trigger={own['trigger']} are pending in the state; resume with that trigger")
        shapes, saved_shapes = ({n: a.shape for n, a in each.items()} for each in (self._anchors, own["anchor"]))
        if list(shapes.items()) != list(saved_shapes.items()):
            raise StateError("the state is of another model; load the state of the same model")
        for name, anchor in self._anchors.items():
            anchor.copy_(own["anchor"][name])
        self._agreed = own["buffers"].to(self._home)
        self._optimizer.load_state_dict(own["outer"])
        saved = own.get("momenta", {})  # none, where it was fixed till then
        if len(saved) == len(self._momenta):  # of other fragments it says nothing
            for number, momentum in self._momenta.items():
                momentum.load_state_dict(saved[number])
        self._session.load_state_dict([state["session"] for state in states])
        self._alike = False
        self._num_rounds = own["rounds"]
        self._num_skipped = own["skipped"]
        self._num_late = own["late_rounds"]
        self._pending = deque(PendingRound.of(saved, self._home) for saved in own["pending"])

    def close(self) -> None:
        """End the thread of exchanges, after those that are in flight."""
        self.closed = True
        if self._background is not None:
            self._background.close()
        self._transport.close()
        if self._node is not None:
            self._node.close()
