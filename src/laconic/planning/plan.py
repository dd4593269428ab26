"""plan(model, optimizer, step): what would pay on this model and network, measured and said beforehand."""

# No deferred annotations here: DDP checks those of its hook.

import copy
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic.adapters.ddp import WORTH_A_PIPELINE, DdpAdapter
from laconic.adapters.rank_agreement import check_common
from laconic.adapters.torch_hooks import HookSwitch, check_free, kept_as_they_are, unwrapped
from laconic.errors import SchemeError
from laconic.layout import Layout, plain_name
from laconic.planning.answer import Plan, answer
from laconic.planning.candidates import CANDIDATES, Candidate, candidate, optimizer_name
from laconic.planning.links import measure_pairs, meet, slowest
from laconic.planning.prediction import Compute
from laconic.planning.rehearsal import measure_exchanges
from laconic.replicas import Optimizers, bucket_layouts, listed
from laconic.scheme import Scheme
from laconic.transport import Everyone, Group, ProcessGroup, naming_lost_peers, own_group, rows_of, world

_REHEARSING_S = 35.0  # after which exchanges are rehearsed as seldom as can be
_PLANNING_S = 45.0  # after which no more is tried
_FIRST_STEPS = 2  # after the first of them DDP cuts its buckets anew
ALONE_S = 24.0  # for all steps without an exchange, the first included; one is taken however long it is
_MEASURED_S = 4.0  # for which steps are measured, two of them at least where there is time
_MOST_STEPS = 10
_TRIED_S = 2.5  # for which steps of a scheme are taken
_LEAST_TRIED = 4
_BURNT = 1 << 18  # entries of what is computed beside a step, to see what that costs


def plan(
    model: nn.Module,
    optimizer: Optimizers,
    step: Callable[[], object],
    *,
    schemes: Sequence[str] = (),
    steps: int = 1000,
    group: ProcessGroup | None = None,
) -> Plan:
    """Measure a training step, the network and what exchanges cost, and rank schemes by time to accuracy.

    A call that all ranks make. `step()` is one training step: forward, backward, optimizer.step(), zero_grad(). `model`
    is what it trains, best as the DistributedDataParallel of the script: then it is known how much of the backward pass
    hides an exchange. `optimizer` may be a list of several. Weights, optimizer, buffers and generators are afterwards
    as before. Without `schemes`, texts as attach() and follow() take them, the usual ones are compared, by the time to
    where bf16 is after `steps` steps.
    """
    start = time.perf_counter()
    candidates = [candidate(text) for text in schemes or CANDIDATES]
    optimizers = listed(optimizer)
    if not all(hasattr(each, "param_groups") for each in optimizers):
        raise SchemeError(f"plan takes an optimizer or several, not {optimizer!r}; write plan(model, optimizer, step)")
    model = unwrapped(model)
    bare = model
    if isinstance(model, DistributedDataParallel):
        check_free(model)  # before anyone waits
        bare = model.module
    if group is None:
        group = model.process_group if isinstance(model, DistributedDataParallel) else world()
    trained = {plain_name(name): p for name, p in bare.named_parameters() if p.requires_grad}
    if not trained:
        raise SchemeError("the model has no parameter that is trained; plan for one that has")
    device = next(iter(trained.values())).device
    check_common(bare, "plan " + ", ".join(map(str, candidates)), group, device)
    own = own_group(group, device)
    transport = Group(own, device)
    try:
        with _as_before(bare, optimizers):
            own_steps = OwnSteps(model, optimizers, step, trained, transport)
            compute, gradients = own_steps.measure()
            measured = measure_exchanges(
                candidates,
                gradients,
                bare,
                optimizer_name(optimizers),
                compute,
                transport,
                group,
                busy=lambda: busy(device),
                until=start + _REHEARSING_S,
            )
            with naming_lost_peers(group.rank()):
                measured = replace(measured, pairs=measure_pairs(own))
            foretold = answer(measured, steps=steps)
            tried = own_steps.try_all(foretold, start + _PLANNING_S)
    finally:
        transport.close()
    return answer(measured.with_tried(tried), steps=steps, seconds=time.perf_counter() - start)


@contextmanager
def _as_before(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Afterwards give back weights, buffers, gradients, the optimizers' states and all generators as they were."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class OwnSteps:
    """A user's steps, taken without an exchange: their seconds, when buckets arrive, and one gradient."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        step: Callable[[], object],
        trained: dict[str, nn.Parameter],
        transport: Group,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._step = step
        self._names: dict[Tensor, str] = {p: name for name, p in trained.items()}
        self._transport = transport
        self._device = next(iter(self._names)).device
        self._begun = 0.0
        self._arrivals: list[float] = []
        self._layouts: list[Layout] = []
        self._gradient: dict[Tensor, Tensor] = {}

    def measure(self) -> tuple[Compute, list[tuple[Layout, Tensor]]]:
        """The cost of steps, and the last one's gradient in buckets."""
        own: list[float] = []
        arrivals: list[list[float]] = []
        with self._listening():
            left_s = ALONE_S
            for _ in range(_FIRST_STEPS):
                own, arrivals = [self._timed()], [self._arrivals]
                step_s = slowest(self._transport, own[0])
                left_s -= step_s
                if left_s < step_s:
                    break
            alone_number, number, beside_number = step_counts(step_s, left_s)
            with self._model.no_sync() if isinstance(self._model, DistributedDataParallel) else nullcontext():
                alone = [self._plain() for _ in range(alone_number)][1:] or own
            for _ in range(number):
                own.append(self._timed())
                arrivals.append(self._arrivals)
            with busy(self._device):
                beside = [self._timed() for _ in range(beside_number)] or own
        everyone = self._everyone(own)
        alone_s = statistics.median(statistics.fmean(row) for row in self._everyone(alone))
        own_s = statistics.median(statistics.fmean(row) for row in everyone)
        together_s = statistics.median(max(row) for row in everyone)
        slowed_s = statistics.median(statistics.fmean(row) for row in self._everyone(beside))
        places = [statistics.median(column) for column in zip(*arrivals, strict=True)] if arrivals[0] else []
        gradients = self._in_buckets()
        # In a step that waits for the slowest, buckets wait as long, each for the slowest worker's.
        stretch = together_s / max(statistics.median(own), 1e-9)
        arrivals_s = tuple(min(together_s, stretch * place) for place in places) or (together_s,) * len(gradients)
        return (
            Compute(
                alone_s=alone_s,
                together_s=together_s,
                arrivals_s=tuple(max(row) for row in self._everyone(arrivals_s)),
                num_entries=tuple(layout.num_entries for layout, _ in gradients),
                pipelined=sum(layout.num_entries for layout, _ in gradients) >= WORTH_A_PIPELINE,
                beside=min(1.0, max(0.0, slowed_s / own_s - 1)),
            ),
            gradients,
        )

    def try_all(self, foretold: Plan, until: float) -> dict[Candidate, float]:
        """Really take steps under bf16, then under what seems soonest among gradients, while there is time."""
        tried: dict[Candidate, float] = {}
        if not isinstance(self._model, DistributedDataParallel):
            return tried
        order = sorted(foretold.rows, key=lambda row: row.scheme != "bf16")  # stable: the soonest first
        for row in order:
            each = candidate(row.scheme)
            if each.scheme.of_what != "gradients" or each.accumulate > 1:
                continue
            expected_s = (_FIRST_STEPS + _LEAST_TRIED) * row.step_ms / 1e3
            if slowest(self._transport, time.perf_counter() + expected_s - until) < 0:
                tried[each] = self._try(each.scheme.exchanged, row.step_ms / 1e3)
        return tried

    def _try(self, scheme: Scheme, expected_s: float) -> float:
        assert isinstance(self._model, DistributedDataParallel)
        named = {name: p for p, name in self._names.items()}
        everyone = Everyone(self._model.process_group)
        parts = named, scheme, self._transport, everyone, self._device
        adapter = DdpAdapter(*parts, check_replicas_every=0, advises=False)  # nobody has chosen it yet
        switch = HookSwitch.of(self._model)
        switch.listener = adapter.submit
        number = max(_LEAST_TRIED, min(_MOST_STEPS, round(_TRIED_S / expected_s)))
        try:
            for _ in range(_FIRST_STEPS):
                self._timed()
            self._meet()
            own = [self._plain() for _ in range(number)]
        finally:
            switch.listener = None
            adapter.stop()
        return statistics.median(max(row) for row in self._everyone(own))

    def _timed(self) -> float:
        """One step, which all workers begin at once."""
        self._meet()
        return self._plain()

    def _meet(self) -> None:
        with self._transport.traffic.uncounted():
            meet(self._transport)

    def _plain(self) -> float:
        self._arrivals = []
        self._layouts = []
        self._begun = time.perf_counter()
        self._step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._begun

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Get every bucket, and the gradient before the optimizer sees it."""
        with ExitStack() as undo:
            for optimizer in self._optimizers:
                undo.callback(optimizer.register_step_pre_hook(self._take_gradient).remove)
            if isinstance(self._model, DistributedDataParallel):
                switch = HookSwitch.of(self._model)
                undo.callback(setattr, switch, "listener", None)
                undo.callback(setattr, self._model, "broadcast_buffers", self._model.broadcast_buffers)
                switch.listener = self._bucket_came
                self._model.broadcast_buffers = False  # or workers would wait for each other in every forward pass
            yield

    def _bucket_came(self, bucket: GradBucket) -> Future[Tensor]:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # when it is there, not when it was asked for
        self._arrivals.append(time.perf_counter() - self._begun)
        parameters = bucket.parameters()
        self._layouts.append(Layout.of([self._names[p] for p in parameters], [p.shape for p in parameters]))
        return kept_as_they_are(bucket)

    def _take_gradient(self, *_: Any) -> None:
        self._gradient = {p: p.grad.detach().flatten().float().clone() for p in self._names if p.grad is not None}

    def _in_buckets(self) -> list[tuple[Layout, Tensor]]:
        """The last step's gradient, as DDP cut it, or else as it would; zero where a parameter had none."""
        by_name = {self._names[p]: gradient for p, gradient in self._gradient.items()}
        shapes = {name: p.shape for p, name in self._names.items()}
        backwards = Layout.of(list(reversed(shapes)), list(reversed(shapes.values())))
        buckets = []
        for layout in self._layouts or bucket_layouts(backwards.spans):
            parts = [by_name.get(name, torch.zeros(shapes[name].numel(), device=self._device)) for name in layout.names]
            buckets.append((layout, torch.cat(parts)))
        return buckets

    def _everyone(self, own: Sequence[float]) -> list[list[float]]:
        """The seconds of each worker, by step."""
        return [list(step) for step in zip(*rows_of(self._transport, own), strict=True)]


def step_counts(step_s: float, left_s: float) -> tuple[int, int, int]:
    """The numbers of steps alone, with all workers at once, and beside a busy thread: fewer where they take long."""
    number = max(2, min(_MOST_STEPS, round(_MEASURED_S / step_s)))
    for numbers in ((max(3, number // 2), number, max(2, number // 3)), (2, 1, 1)):
        if sum(numbers) * step_s <= left_s:
            return numbers
    return 0, 0, 0


@contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """Let another thread compute all the while, as an exchange would."""
    over = threading.Event()

    def burn() -> None:
        values = torch.ones(_BURNT, device=device)
        torch.set_num_threads(1)
        while not over.is_set():
            values.mul_(1.0)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    before = torch.get_num_threads()
    thread = threading.Thread(target=burn, name="laconic-beside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        torch.set_num_threads(before)
