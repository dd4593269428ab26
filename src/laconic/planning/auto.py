"""scheme="auto": begin with what is simple, plan after some steps, go on under the choice, see whether it holds."""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future

from laconic.adapters import DdpAdapter, HookSwitch, SessionOptions, ready
from laconic.adapters.ddp import WORTH_A_PIPELINE
from laconic.adapters.optimizers import SteppedBy
from laconic.errors import SchemeError, StateError
from laconic.layout import Layout, plain_name
from laconic.planning.answer import Plan, answer
from laconic.planning.candidates import AUTOMATIC, OPTIMIZERS, candidate, kind_of, optimizer_name
from laconic.planning.links import slowest
from laconic.planning.prediction import Compute
from laconic.planning.rehearsal import measure_exchanges
from laconic.recipes import parse
from laconic.replicas import Follower, Optimizers, Policy, bucket_layouts
from laconic.session import Attached, Stats
from laconic.transport import Everyone, Group, ProcessGroup, own_group

_log = logging.getLogger("laconic.planning")

_PLAIN = "bf16"  # what gradients begin under, and go back to
_FIRST_DRIFT = "local:every=8"
_PLANS_AT = 6  # the step of gradients; DDP cuts its buckets anew after the first
_UNSETTLED = 2  # steps under a scheme that are not looked at
_JUDGES_AT = 8  # the step under a choice
_MAY_BE_SLOWER = 1.03  # than bf16, to the same loss
_RECENT = 50  # steps whose times are kept
_AGREED_ON = "every rank gives the same states, of attach(ddp, 'auto') or follow(model, optimizer, 'auto')"


class AutoSession(Attached):
    """The result of attach(ddp, "auto"): an adapter under bf16, and after some steps another, if that pays."""

    transport: Group

    def __init__(self, module: nn.Module, timeout_s: float | None, **options: Unpack[SessionOptions]) -> None:
        ddp, named, device = ready(module, "auto")
        self.transport = Group(own_group(ddp.process_group, device, timeout_s), device)
        self.everyone: Everyone = Everyone(ddp.process_group)
        self.plan: Plan | None = None  # once there is one
        self._group = ddp.process_group
        self._model = ddp.module
        self._device = device
        self._make = partial(self._adapted, named, holds_idle=ddp.find_unused_parameters, **options)
        self._names = {p: plain_name(name) for name, p in ddp.module.named_parameters()}
        self._adapter = self._make(_PLAIN)
        self._present = _PLAIN
        self._stepped_by = SteppedBy(self._names)
        self._choice: str | None = None  # None while it is open
        self._next: str | None = None  # what the next step begins with
        self._plain_s = 0.0  # of a step under bf16
        self._applied_at = 0.0  # when the last step's gradient was there
        self._begin()
        self._switch = HookSwitch.of(ddp)
        self._switch.listener = self._submit

    def _adapted(self, named: Mapping[str, Tensor], text: str, **options: Any) -> DdpAdapter:
        """An adapter under the scheme that a text names."""
        return DdpAdapter(named, parse(text).exchanged, self.transport, self.everyone, self._device, **options)

    def _begin(self) -> None:
        self._steps = 0
        self._arrivals: list[float] = []  # of this step's buckets, since the last step's gradient was there
        self._arrivals_by_step: list[list[float]] = []
        self._step_s: list[float] = []
        self._in_flight: list[Future[Tensor]] = []
        self._gradients: list[tuple[Layout, Tensor]] = []

    def _submit(self, bucket: GradBucket) -> Future[Tensor]:
        """Pass a bucket on, and note when it came; before the last one of a certain step, plan."""
        if not self._arrivals and self._next is not None:
            self._turn_to(self._next)
        plans = self._choice is None and self._steps == _PLANS_AT
        if self._choice is None and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # when it is there, not when it was asked for
        self._arrivals.append(time.perf_counter() - self._applied_at)
        if plans:
            parameters = bucket.parameters()
            layout = Layout.of([self._names[p] for p in parameters], [p.shape for p in parameters])
            self._gradients.append((layout, bucket.buffer().detach().float().clone()))
        if plans and bucket.is_last():
            self._plan()
        outcome = self._adapter.submit(bucket)
        self._in_flight.append(outcome)
        if bucket.is_last():
            self._end_step(outcome)
        return outcome

    def _end_step(self, last: Future[Tensor]) -> None:
        begun_at = self._applied_at
        settled = self._steps >= _UNSETTLED
        if settled and self._choice is None:
            self._arrivals_by_step.append(self._arrivals)
        steps_s = self._step_s

        def note_applied(_: Future[Tensor]) -> None:
            self._applied_at = time.perf_counter()
            if settled:
                steps_s.append(self._applied_at - begun_at)
                del steps_s[:-_RECENT]

        last.add_done_callback(note_applied)
        self._arrivals = []
        self._in_flight = []
        self._steps += 1
        if self._steps == _JUDGES_AT and self._plain_s:
            last.wait()
            self._judge()

    def _plan(self) -> None:
        """Measure and choose, between two buckets, when nothing is on its way."""
        for outcome in self._in_flight:
            outcome.wait()
        candidates = [each for each in map(candidate, AUTOMATIC) if each.scheme.of_what == "gradients"]
        with self.transport.traffic.uncounted():
            places = [statistics.median(column) for column in zip(*self._arrivals_by_step, strict=True)]
            arrivals = [slowest(self.transport, place) for place in places]
            # The optimizer's step, forward and backward lie between two exchanges.
            compute = _compute(arrivals[-1], arrivals, self._gradients, self._device)
            measured = measure_exchanges(
                candidates, self._gradients, self._model, self._optimizer_name(), compute, self.transport, self._group
            )
            self._plain_s = slowest(self.transport, statistics.median(self._step_s))
        measured = measured.with_tried({candidate(_PLAIN): self._plain_s})
        self._gradients = []
        self.plan = answer(measured)
        self._choice = self.plan.pick
        _say(self.transport.rank, f"auto continues under {self.plan.pick}: {self.plan.reasons[0]}")
        if self.plan.pick == _PLAIN:
            self._plain_s = 0.0  # nothing to judge
        else:
            self._next = self.plan.pick

    def _optimizer_name(self) -> str:
        """The kind of what was seen to step, the same on all ranks; else what most train such models by."""
        seen = list(self._stepped_by.optimizers)
        self._stepped_by.close()
        usual = "adamw" if kind_of(self._model) == "transformer" else "sgd"
        name = optimizer_name(seen) if seen else usual
        return OPTIMIZERS[int(slowest(self.transport, OPTIMIZERS.index(name)))]

    def _judge(self) -> None:
        """Go back to bf16 where steps under the choice take so long that it is slower in all."""
        assert self.plan is not None
        row = next(row for row in self.plan.rows if row.scheme == self._choice)
        with self.transport.traffic.uncounted():
            step_s = slowest(self.transport, statistics.median(self._step_s))
        if step_s * (row.steps_factor or 1.0) > _MAY_BE_SLOWER * self._plain_s:
            took = f"a step takes {1e3 * step_s:.0f} ms instead of {row.step_ms:.0f}"
            _say(self.transport.rank, f"auto goes back to {_PLAIN}: under {self._choice} {took}")
            self._choice = self._next = _PLAIN
        self._plain_s = 0.0

    def _turn_to(self, text: str) -> None:
        self._stepped_by.close()
        self._adapter.stop()
        before = self._adapter.session
        self._adapter = self._make(text)
        self._adapter.session.count_on_from(before)
        self._present = text
        self._next = None
        self._begin()

    @property
    def session(self) -> Any:
        """The present one."""
        return self._adapter.session

    @property
    def error(self) -> BaseException | None:
        return self._adapter.error

    @property
    def last_step_finite(self) -> bool:
        return self._adapter.last_step_finite

    def check_replicas_(self) -> None:
        self._adapter.check_replicas_()

    def stats(self, *, ages: bool = False) -> Stats:
        return self._adapter.stats(ages=ages)

    def metrics(self, *, norms: bool = False) -> dict[str, float]:
        return self._adapter.metrics(norms=norms)

    def discard_(self) -> None:
        self._adapter.discard_()

    def state_dict(self) -> dict[str, Any]:
        if self._next is not None:  # what is chosen begins with the next step, and has nothing to be saved yet
            self._turn_to(self._next)
        return {"auto": self._choice, "chosen": self._adapter.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        choice, states = _chosen(saved)
        if choice is not None:
            self._choice = choice
            self._plain_s = 0.0  # of other steps, or of a choice that was judged
            self._next = None
            if choice != self._present:
                self._turn_to(choice)
        self._adapter.load_state_dict(states)

    def close(self) -> None:
        self._switch.release()
        self._stepped_by.close()
        self._adapter.close()


class AutoFollower(Follower):
    """The result of follow(model, optimizer, "auto"): averages at first, and after the first of them what pays."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        group: ProcessGroup,
        make: Callable[[str], Follower],
        device: torch.device,
    ) -> None:
        super().__init__(_policy_of(make(_FIRST_DRIFT)))
        self.plan: Plan | None = None  # once there is one
        self.everyone = Everyone(group)
        self._model = model
        self._optimizer = optimizer
        self._group = group
        self._make = make
        self._device = device
        self._choice: str | None = None
        self._begin_at = self.vector.read()
        self._left_at = time.perf_counter()
        self._alone_s: list[float] = []

    def step(self) -> None:
        """Count a step; after the first agreement, plan, and go on under the choice."""
        if self._choice is None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a plan needs each step's own time; later many even out
        self._alone_s.append(time.perf_counter() - self._left_at)
        del self._alone_s[:-_RECENT]
        super().step()
        if self._choice is None and self._steps == _steps_of(_FIRST_DRIFT):
            self._plan()
        self._left_at = time.perf_counter()

    def _plan(self) -> None:
        """Measure and choose; after an agreement all models are the same."""
        drift = self._drifts()
        candidates = [each for each in map(candidate, AUTOMATIC) if each.scheme.of_what != "gradients"]
        transport = Group(own_group(self._group, self._device), self._device)
        try:
            alone_s = slowest(transport, statistics.median(self._alone_s[_UNSETTLED:]))
            compute = _compute(alone_s, [alone_s] * len(drift), drift, self._device)
            measured = measure_exchanges(
                candidates, drift, self._model, optimizer_name(self._optimizer), compute, transport, self._group
            )
        finally:
            transport.close()
        self.plan = answer(measured)
        self._begin_at = torch.empty(0)
        _say(self._group.rank(), f"auto continues under {self.plan.pick}: {self.plan.reasons[0]}")
        self._turn_to(self.plan.pick)

    def _drifts(self) -> list[tuple[Layout, Tensor]]:
        """The way of the model since the beginning, in buckets."""
        drift = (self._begin_at - self.vector.read()).to(self._device)
        drifts = []
        start = 0
        for layout in bucket_layouts(self.vector.parameter_spans):
            drifts.append((layout, drift[start : start + layout.num_entries].clone()))
            start += layout.num_entries
        return drifts

    def _turn_to(self, text: str) -> None:
        self._choice = text
        self.policy.close()
        self._begin(_policy_of(self._make(text)))
        self._alone_s = []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "auto": self._choice}

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        choice, _ = _chosen(saved)
        if choice is not None and choice != self._choice:
            self._turn_to(choice)
        super().load_state_dict(saved)


def _policy_of(follower: Follower) -> Policy:
    """The policy of a follower that nobody calls, nor is to be reminded of."""
    follower._reminder.stop()
    return follower.policy


def _compute(
    step_s: float, arrivals_s: Sequence[float], vectors: Sequence[tuple[Layout, Tensor]], device: torch.device
) -> Compute:
    """The parts of a step that are known in the midst of training: its length, not the cost of work beside it."""
    num_entries = tuple(layout.num_entries for layout, _ in vectors)
    return Compute(
        alone_s=step_s,
        together_s=step_s,
        arrivals_s=tuple(arrivals_s),
        num_entries=num_entries,
        pipelined=sum(num_entries) >= WORTH_A_PIPELINE,
        beside=0.0 if device.type == "cuda" else 1.0,
    )


def _steps_of(text: str) -> int:
    return int(parse(text).when.every)  # type: ignore[union-attr]


def _chosen(saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[str | None, Any]:
    """(the choice, None if it was open, and a session's states under it)."""
    states = [saved] if isinstance(saved, Mapping) else list(saved)
    if not states or any("auto" not in state for state in states):
        raise StateError(f"the state is of another scheme; {_AGREED_ON}")
    chosen = [state.get("chosen") for state in states]
    return states[0]["auto"], chosen[0] if isinstance(saved, Mapping) else chosen


def _say(rank: int, text: str) -> None:
    if rank == 0:
        _log.warning(text)


def check_auto(*given: object) -> None:
    """SchemeError where an option leaves auto no choice."""
    if any(given):
        raise SchemeError(
            "auto chooses among what workers do by themselves; leave servers=, outer_optimizer= and node_group= out"
        )
