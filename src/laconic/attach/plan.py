"""plan(model, optimizer, step): what would pay on this model and network, measured and said beforehand."""

import copy
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic.attach.alike import check_common
from laconic.attach.ddp import DdpAdapter
from laconic.attach.follow import follow
from laconic.attach.switch import HookSwitch, Listener, kept_as_they_are
from laconic.attach.unwrap import unwrapped
from laconic.errors import SchemeError
from laconic.layout import Layout, plain_name
from laconic.planning import (
    CANDIDATES,
    Candidate,
    Compute,
    Links,
    Measured,
    Plan,
    Rehearsal,
    answer,
    candidate,
    kind_of,
    measure_links,
    meet,
    optimizer_name,
    rehearse,
)
from laconic.scheme import GossipScheme, OuterScheme, Scheme
from laconic.transport import Everyone, Group, ProcessGroup, own_group, world

_FIRST_STEPS = 2  # after the first of them DDP cuts its buckets anew
_MEASURED_S = 4.0  # for which steps are measured, two of them at least
_MOST_STEPS = 10
_PLANNING_S = 45.0  # after which no more is tried
_TRIED_S = 2.5  # for which steps of a scheme are taken
_LEAST_TRIED = 4
_BUCKET_ENTRIES = 25 * (1 << 20) // 4  # of DDP's default
_BURNT = 1 << 18  # entries of what is computed beside a step, to see what that costs
_OUTER_PASSES = 10  # over the model in an outer step: drift, anchor, momentum, model
_GOSSIP_STEPS = 10
_GOSSIP_STEP_S = 0.1  # at most, between two of them


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], object],
    *,
    schemes: Sequence[str] = (),
    steps: int = 1000,
    group: ProcessGroup | None = None,
) -> Plan:
    """Measure a training step, the network and what exchanges cost, and rank schemes by time to accuracy.

    A call that all ranks make. `step()` is one training step: forward, backward, optimizer.step(), zero_grad(). `model`
    is what it trains, best as the DistributedDataParallel of the script: then it is known how much of the backward pass
    hides an exchange. Weights, optimizer, buffers and generators are afterwards as before. Without `schemes`, texts as
    attach() and follow() take them, the usual ones are compared, by the time to where bf16 is after `steps` steps.
    """
    start = time.perf_counter()
    candidates = [candidate(text) for text in schemes or CANDIDATES]
    model = unwrapped(model)
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    if group is None:
        group = model.process_group if isinstance(model, DistributedDataParallel) else world()
    trained = {plain_name(name): p for name, p in bare.named_parameters() if p.requires_grad}
    if not trained:
        raise SchemeError("the model has no parameter that is trained; plan for one that has")
    device = next(iter(trained.values())).device
    check_common(bare, "plan " + ", ".join(map(str, candidates)), group, device)
    transport = Group(own_group(group, device), device)
    try:
        with _as_before(bare, optimizer):
            own_steps = _Steps(model, optimizer, step, trained, transport)
            compute, gradients = own_steps.measure()
            links = measure_links(transport, lambda: _burning(device))
            rehearsals = _rehearse_all(candidates, gradients, bare, compute, transport, links, group)
            measured = Measured(
                compute=compute,
                links=links,
                rehearsals=tuple(rehearsals.items()),
                tried_s=(),
                layouts=tuple(layout for layout, _ in gradients),
                num_workers=group.size(),
                kind=kind_of(bare),
                optimizer=optimizer_name(optimizer),
                device=device.type,
            )
            foretold = answer(measured, steps=steps)
            tried = own_steps.try_all(foretold, start + _PLANNING_S)
    finally:
        transport.close()
    measured = replace(measured, tried_s=tuple(tried.items()))
    return answer(measured, steps=steps, seconds=time.perf_counter() - start)


@contextmanager
def _as_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Afterwards give back weights, buffers, gradients, the optimizer's state and all generators as they were."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    kept = copy.deepcopy(optimizer.state_dict())
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    of_torch = torch.get_rng_state()
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
        optimizer.load_state_dict(kept)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)


class _Steps:
    """A user's steps, taken without an exchange: their seconds, when buckets arrive, and one gradient."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], object],
        trained: dict[str, nn.Parameter],
        transport: Group,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self._names: dict[Tensor, str] = {p: name for name, p in trained.items()}
        self._transport = transport
        self._device = next(iter(self._names)).device
        self._begun = 0.0
        self._arrivals: list[float] = []
        self._layouts: list[Layout] = []
        self._gradient: dict[Tensor, Tensor] = {}

    def measure(self) -> tuple[Compute, list[tuple[Layout, Tensor]]]:
        """What steps cost, and the last one's gradient in buckets."""
        with self._listening():
            for _ in range(_FIRST_STEPS):
                self._timed()
            first_s = self._slowest(self._timed())
            number = max(2, min(_MOST_STEPS, round(_MEASURED_S / first_s)))
            own: list[float] = []
            arrivals: list[list[float]] = []
            for _ in range(number):
                own.append(self._timed())
                arrivals.append(list(self._arrivals))
            with _burning(self._device):
                beside = [self._timed() for _ in range(max(2, number // 3))]
        everyone = self._everyone(own)
        alone_s = statistics.median(statistics.fmean(row) for row in everyone)
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
                arrivals_s=tuple(self._everyone_max(arrivals_s)),
                num_entries=tuple(layout.num_entries for layout, _ in gradients),
                beside=min(1.0, max(0.0, slowed_s / alone_s - 1)),
            ),
            gradients,
        )

    def try_all(self, foretold: Plan, until: float) -> dict[Candidate, float]:
        """Really take steps under bf16, then under the candidates of gradients that seem soonest, while there is time.

        What accumulates follows from the same scheme's own step.
        """
        tried: dict[Candidate, float] = {}
        if not isinstance(self._model, DistributedDataParallel):
            return tried
        order = sorted(foretold.rows, key=lambda row: row.scheme != "bf16")  # stable: the soonest first
        for row in order:
            asked = candidate(row.scheme)
            if not isinstance(asked.scheme, Scheme) or asked.accumulate > 1:
                continue
            expected_s = (_FIRST_STEPS + _LEAST_TRIED) * row.step_ms / 1e3
            if self._slowest(time.perf_counter() + expected_s - until) < 0:
                tried[asked] = self._try(asked.scheme, row.step_ms / 1e3)
        for asked, _ in foretold.measured.rehearsals:
            once = Candidate(asked.scheme)
            if asked.accumulate > 1 and once in tried:
                alone_s = (asked.accumulate - 1) * foretold.measured.compute.alone_s
                tried[asked] = (alone_s + tried[once]) / asked.accumulate
        return tried

    def _try(self, scheme: Scheme, expected_s: float) -> float:
        """Seconds of a step under a scheme."""
        assert isinstance(self._model, DistributedDataParallel)
        named = {name: p for p, name in self._names.items()}
        everyone = Everyone(self._model.process_group)
        adapter = DdpAdapter(named, scheme, self._transport, everyone, self._device, drift_every=0)
        switch = HookSwitch.of(self._model)
        switch.listener = adapter.submit
        number = max(_LEAST_TRIED, min(_MOST_STEPS, round(_TRIED_S / expected_s)))
        try:
            for _ in range(_FIRST_STEPS):
                self._timed()
            with self._transport.traffic.uncounted():
                meet(self._transport)
            own = [self._plain() for _ in range(number)]
        finally:
            switch.listener = None
            adapter.stop()
        return statistics.median(max(row) for row in self._everyone(own))

    def _timed(self) -> float:
        """One step, which all workers begin at once."""
        with self._transport.traffic.uncounted():
            meet(self._transport)
        return self._plain()

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
        """Hear of every bucket, and of the gradient before the optimizer sees it."""
        handle = self._optimizer.register_step_pre_hook(self._take_gradient)
        try:
            if not isinstance(self._model, DistributedDataParallel):
                yield
                return
            switch = HookSwitch.of(self._model)
            listener: Listener = self._bucket_came
            broadcasts = self._model.broadcast_buffers
            switch.listener = listener
            self._model.broadcast_buffers = False  # or workers would wait for each other in every forward pass
            try:
                yield
            finally:
                switch.listener = None
                self._model.broadcast_buffers = broadcasts
        finally:
            handle.remove()

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
        found = []
        for layout in self._layouts or _cut(list(reversed(self._names.items()))):
            parts = [by_name.get(name, torch.zeros(shapes[name].numel(), device=self._device)) for name in layout.names]
            found.append((layout, torch.cat(parts)))
        return found

    def _everyone(self, mine: Sequence[float]) -> list[list[float]]:
        """By step, the seconds of each worker."""
        card = torch.tensor(mine, dtype=torch.float64).view(torch.uint8)
        rows: Tensor = self._transport.tell_all(card).contiguous().view(torch.float64)
        by_step: list[list[float]] = rows.view(self._transport.num_workers, -1).T.tolist()
        return by_step

    def _everyone_max(self, mine: Sequence[float]) -> list[float]:
        return [max(row) for row in self._everyone(mine)]

    def _slowest(self, mine: float) -> float:
        return self._everyone_max([mine])[0]


def _cut(named: Sequence[tuple[Tensor, str]]) -> list[Layout]:
    """Buckets of about DDP's size."""
    layouts: list[Layout] = []
    names: list[str] = []
    shapes: list[torch.Size] = []
    for parameter, name in named:
        names.append(name)
        shapes.append(parameter.shape)
        if sum(shape.numel() for shape in shapes) >= _BUCKET_ENTRIES:
            layouts.append(Layout.of(names, shapes))
            names = []
            shapes = []
    return [*layouts, Layout.of(names, shapes)] if names else layouts


@contextmanager
def _burning(device: torch.device) -> Iterator[None]:
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


def _rehearse_all(
    candidates: Sequence[Candidate],
    gradients: Sequence[tuple[Layout, Tensor]],
    model: nn.Module,
    compute: Compute,
    transport: Group,
    links: Links,
    group: ProcessGroup,
) -> dict[Candidate, Rehearsal]:
    """Each candidate's exchange; those that say the same are rehearsed once."""
    known: dict[object, Rehearsal] = {}
    found = {}
    for asked in candidates:
        scheme = asked.scheme
        if isinstance(scheme, GossipScheme):
            found[asked] = _rehearse_gossip(scheme, gradients, model, compute, links, group)
            continue
        assert isinstance(scheme, Scheme | OuterScheme)
        said = scheme.said if isinstance(scheme, OuterScheme) else scheme
        key = said.select, said.quantize, said.memory, said.exchange, said.trigger
        if key not in known:
            known[key] = rehearse(scheme, gradients, transport, links)
        found[asked] = known[key] if scheme.of_what == "gradients" else _with_outer_step(known[key], gradients)
    return found


def _with_outer_step(rehearsal: Rehearsal, gradients: Sequence[tuple[Layout, Tensor]]) -> Rehearsal:
    """With what reading a drift, stepping the anchor and writing the model take: passes over memory."""
    flat = gradients[0][1]
    other = flat.clone()
    found = []
    for _ in range(3):
        start = time.perf_counter()
        other.add_(flat)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        found.append(time.perf_counter() - start)
    pass_s = min(found) * rehearsal.num_entries / flat.numel()
    changed = {**rehearsal.as_dict(), "apply_s": rehearsal.apply_s + _OUTER_PASSES * pass_s}
    return Rehearsal(**changed)


def _rehearse_gossip(
    scheme: GossipScheme,
    gradients: Sequence[tuple[Layout, Tensor]],
    model: nn.Module,
    compute: Compute,
    links: Links,
    group: ProcessGroup,
) -> Rehearsal:
    """Some steps of a copy of the model, with pauses where it would train."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
    by_name = {span.name: flat[span.start : span.stop] for layout, flat in gradients for span in layout.spans}
    follower = follow(twin, optimizer, scheme, group=group)
    for _ in range(_GOSSIP_STEPS):
        time.sleep(min(compute.alone_s, _GOSSIP_STEP_S))
        for name, parameter in twin.named_parameters():
            if plain_name(name) in by_name:
                parameter.grad = by_name[plain_name(name)].view_as(parameter).to(parameter.dtype)
        optimizer.step()
        follower.step()
    stats = follower.stats()
    follower.close()
    num_entries = sum(layout.num_entries for layout, _ in gradients)
    whole = Layout.of([name for name in by_name], [flat.numel() for flat in by_name.values()])
    bytes_out = scheme.bytes_out(whole, group.size())
    return Rehearsal(
        choose_s=sum(stats.seconds.values()) / _GOSSIP_STEPS,
        talk_s=links.frames.seconds(bytes_out),
        apply_s=0.0,
        bytes_out=bytes_out,
        num_messages=1,
        busy_talk_s=0.0,
        num_entries=num_entries,
        adds=False,
    )
