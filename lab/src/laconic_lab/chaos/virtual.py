"""Faults of messages and deaths on virtual workers in one process: hundreds a minute."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it when it is first made: seconds, which are no fault's
from torch import Tensor, nn

from laconic.errors import LaconicError, LaunchError
from laconic.layout import Bucket, Layout
from laconic.recipes import parse
from laconic.replicas import Follower, policy_for
from laconic.scheme import GossipScheme, OuterScheme, Scheme
from laconic.session import Session
from laconic.testing import (
    Fault,
    Faults,
    FaultyCollectives,
    FaultyMailbox,
    InProcess,
    WorkerDiedError,
    in_process,
    open_mailbox,
)
from laconic.transport import Collectives
from laconic_lab.chaos.mass import keeps_all
from laconic_lab.chaos.schedule import CHECKPOINT_EVERY, NUM_WORKERS, STEPS, Case, Outcome

DEADLINE_S = 60.0
_LAYOUTS = (Layout.of(["a", "b"], [(30, 40), (10,)]), Layout.of(["c"], [(700,)]))
_PATIENCE_S = 0.5
_TIMEOUT_S = 5.0
_LR = 0.1
_MASS_ATOL = 1e-3  # some dozen float32 sums of values up to 60
_building = threading.Lock()  # torch has one generator for all threads
_RAW_CALLS = (
    "all_reduce_",
    "sum_gradients_",
    "all_to_all",
)  # carry numbers without a frame: TCP's own check is all they have
_RAW_KINDS = ("measured", "flags", "pairs", "norms", "scales", "codes")


def warm_up(case: Case) -> None:
    """Run its scheme undisturbed, unless that was done before."""
    if not _is_free(parse(case.scheme)):
        _undisturbed(case.family, case.scheme)


def _is_free(scheme: object) -> bool:
    return isinstance(scheme, GossipScheme) and scheme.exchange.mode != "matched"


def check(case: Case) -> Outcome:
    """Let a fault befall virtual workers, and check what is promised."""
    scheme = parse(case.scheme)
    if isinstance(scheme, GossipScheme) and _is_free(scheme):
        return _within_deadline(lambda: _check_gossip(case, scheme))
    return _within_deadline(lambda: _check_in_step(case))


def _within_deadline(work: Callable[[], Outcome]) -> Outcome:
    """Run `work`; a thread that hangs is left behind."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(work()), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if thread.is_alive():
        return Outcome([f"every worker ends or goes on within {DEADLINE_S:g} s"])
    return (
        outcomes[0] if outcomes else Outcome(["a fault is an error of laconic's, in one line: the check itself failed"])
    )


class _GradientWorker:
    """A virtual worker that exchanges made-up gradients; `step` calls `at` with the phase that begins."""

    def __init__(self, scheme: Scheme, end: Collectives) -> None:
        self._session = Session(scheme, end)
        self._rank = end.rank
        self._keeps_all = keeps_all(str(scheme))
        self._model = {span.name: torch.zeros(span.num_entries) for layout in _LAYOUTS for span in layout.spans}
        self._given = {name: torch.zeros_like(x) for name, x in self._model.items()}

    def step(self, number: int, at: Callable[[str], None]) -> None:
        gradient = self._gradient(number)
        last = len(_LAYOUTS) - 1
        buckets = [
            Bucket(index, layout, torch.cat([gradient[name] for name in layout.names]), is_last=index == last)
            for index, layout in enumerate(_LAYOUTS)
        ]
        at("choose")
        if self._session.wants_whole_step:
            self._session.exchange_step_(buckets)
        else:
            for bucket in buckets:
                exchange = self._session.begin(bucket)
                at("encode")
                while exchange.message is not None:
                    exchange.resume(self._session.send(exchange))
                at("apply")
                self._session.end_(exchange)
        for bucket in buckets:
            for span in bucket.layout.spans:
                self._given[span.name] += gradient[span.name]
                self._model[span.name] += bucket.flat[span.start : span.stop]

    def _gradient(self, number: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(7919 * (number + 1) + self._rank)
        return {name: torch.randn(x.numel(), generator=draw) ** 3 for name, x in self._model.items()}

    def read(self) -> Tensor:
        return torch.cat(list(self._model.values()))

    def state(self) -> dict[str, Any]:
        return {"model": self._model, "given": self._given, "session": self._session.state_dict()}

    def load(self, states: list[dict[str, Any]]) -> None:
        own = states[self._rank]
        self._model = own["model"]
        self._given = own["given"]
        self._session.load_state_dict([state["session"] for state in states])

    def lost_mass(self, states: list[dict[str, Any]]) -> float:
        """The part that is missing of all that all workers gave so far; 0 where that cannot be told."""
        if not self._keeps_all:
            return 0.0
        lost = 0.0
        for name, applied in states[0]["model"].items():
            kept = sum(state["session"]["memory"]["residual"][name] for state in states)
            given = sum(state["given"][name] for state in states)
            lost = max(lost, float((given - len(states) * applied - kept).abs().max()))
        return lost


class _FollowingWorker:
    """Drifts, and agrees with the others by outer steps or by gossip in step."""

    def __init__(self, scheme: OuterScheme | GossipScheme, end: Collectives) -> None:
        self._rank = end.rank
        self._network = _model(0)
        optimizer = torch.optim.SGD(self._network.parameters(), lr=_LR)
        self._follower = Follower(policy_for(self._network, optimizer, scheme, end, in_background=False))

    def step(self, number: int, at: Callable[[str], None]) -> None:
        at("choose")
        draw = torch.Generator().manual_seed(7919 * (number + 1) + self._rank)
        with torch.no_grad():
            for p in self._network.parameters():
                p.add_(torch.randn(p.shape, generator=draw), alpha=0.01)
        at("encode")
        self._follower.step()
        at("apply")
        if number == STEPS - 1:
            at("averaging")
            self._follower.average_()

    def read(self) -> Tensor:
        read: Tensor = self._follower.vector.read()
        return read

    def state(self) -> dict[str, Any]:
        return {"model": self._network.state_dict(), "follower": self._follower.state_dict()}

    def load(self, states: list[dict[str, Any]]) -> None:
        self._network.load_state_dict(states[self._rank]["model"])
        self._follower.load_state_dict([state["follower"] for state in states])

    def lost_mass(self, states: list[dict[str, Any]]) -> float:
        return 0.0


def _model(seed: int) -> nn.Module:
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))


class _Recorded(FaultyCollectives):
    """Notes whether the message that went wrong was a frame."""

    def __init__(self, inner: Collectives, faults: Faults, note: Callable[[str], None]) -> None:
        super().__init__(inner, faults)
        for call in ("all_reduce_", "sum_gradients_", "all_gather", "all_to_all", "broadcast", "push", "sendrecv"):
            setattr(self, call, self._noting(call, getattr(self, call), note))

    def _noting(self, name: str, call: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            before = self.faults.num_messages
            try:
                return call(*arguments)
            finally:
                # A duplicate comes in place of the next message.
                wrong = [n + (fault == Fault.DUPLICATE) for n, fault in self.faults.by_number.items()]
                if any(before <= number < self.faults.num_messages for number in wrong):
                    is_raw = name in _RAW_CALLS or any(word in _RAW_KINDS for word in arguments if type(word) is str)
                    # Two who gossip rely on the order of their connection: frames there name no step.
                    is_again = name == "sendrecv" and Fault.DUPLICATE in self.faults.by_number.values()
                    note("raw" if is_raw or is_again else "frame")

        return noting


@dataclass
class _Run:
    """The end of one run."""

    models: list[Tensor] = field(default_factory=list)
    states: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by steps done, of all ranks or it is none
    lost_mass: float = 0.0
    hit: str = ""  # "raw" or "frame", if a message went wrong
    error: BaseException | None = None


def _run(case: Case | None, family: str, text: str, first: int, states: list[dict[str, Any]] | None) -> _Run:
    """Train from a step on, with a fault if there is one."""
    scheme = parse(text)
    run = _Run()
    saved: dict[int, dict[int, Any]] = {}

    def hit(what: str) -> None:
        run.hit = what

    def work(transport: InProcess) -> tuple[Tensor, float]:
        is_struck = case is not None and case.rank == transport.rank
        faults = Faults(_by_number(case) if case is not None and is_struck else {}, delay_s=0.02)
        end = _Recorded(transport, faults, hit)
        make: Any = _GradientWorker if isinstance(scheme, Scheme) else _FollowingWorker
        worker: _GradientWorker | _FollowingWorker = make(scheme, end)
        number = first

        def at(phase: str) -> None:
            if case is None or not is_struck or (case.fault, case.phase) != ("die", phase):
                return
            if number >= case.number or phase in ("averaging", "resume"):  # which come once
                raise WorkerDiedError(f"rank {case.rank} was to die at {phase}")

        if states is not None:
            worker.load(copy.deepcopy(states))
            at("resume")
        for number in range(first, STEPS):
            at("training")
            worker.step(number, at)
            done = number + 1
            if done % CHECKPOINT_EVERY == 0:
                at("evaluation")
                at("checkpoint")
                saved.setdefault(done, {})[transport.rank] = copy.deepcopy(worker.state())
        lost = worker.lost_mass([saved[STEPS][rank] for rank in sorted(saved[STEPS])]) if _whole(saved, STEPS) else 0.0
        return worker.read(), lost

    try:
        ends = in_process(NUM_WORKERS, work, num_servers=1 if family == "dedicated server" else 0)
        run.models = [model for model, _ in ends]
        run.lost_mass = max(lost for _, lost in ends)
    except BaseException as error:
        run.error = error
    run.states = {done: [by[rank] for rank in sorted(by)] for done, by in saved.items() if _whole(saved, done)}
    return run


def _whole(saved: Mapping[int, Mapping[int, Any]], done: int) -> bool:
    return len(saved.get(done, {})) == NUM_WORKERS


def _by_number(case: Case) -> dict[int, Fault]:
    return {case.number: Fault[case.fault.upper()]} if case.phase == "talk" else {}


@cache
def _undisturbed(family: str, scheme: str) -> Tensor:
    run = _run(None, family, scheme, 0, None)
    if run.error is not None:
        raise run.error
    return run.models[0]


def _check_in_step(case: Case) -> Outcome:
    """Workers that meet at every step, or agree: all end with one line, or go on as if nothing had been."""
    want = _undisturbed(case.family, case.scheme)
    run = _run(case, case.family, case.scheme, 0, None)
    if case.phase == "resume" and case.family != "dedicated server":  # its virtual ones have no state to go on from
        run = _run(case, case.family, case.scheme, CHECKPOINT_EVERY, run.states[CHECKPOINT_EVERY])
    unpromised = run.hit == "raw" and case.fault not in ("delay", "die")
    struck = bool(run.hit) or isinstance(run.error, WorkerDiedError)
    broken: list[str] = []
    if run.error is None:
        if not all(torch.equal(model, run.models[0]) for model in run.models):
            broken.append("replicas are equal")
        if not torch.equal(run.models[0], want):
            broken.append("a damaged frame is an error" if run.hit else "who is slow changes nothing")
        if run.lost_mass > _MASS_ATOL:
            broken.append("no mass is lost")
        return Outcome([] if unpromised else broken, struck)
    if not unpromised and (not isinstance(run.error, LaconicError | WorkerDiedError) or "\n" in str(run.error)):
        broken.append(f"a fault is an error of laconic's, in one line, not {type(run.error).__name__}: {run.error}")
    if case.family == "dedicated server":  # virtual ones have no state to go on from
        return Outcome(broken, struck)
    done = max(run.states, default=0)
    again = _run(None, case.family, case.scheme, done, run.states.get(done))
    if again.error is not None:
        broken.append(f"a run can be resumed ({again.error})")
    elif not torch.equal(again.models[0], want):
        broken.append("a resumed run equals an undisturbed one")
    return Outcome(broken, struck)


def _check_gossip(case: Case, scheme: GossipScheme) -> Outcome:
    """Workers without a barrier: who lives goes on, and what is exchanged is conserved."""
    befalls_replies = case.number % 2 == 1
    by_number = {case.number // 2: Fault[case.fault.upper()]}
    planned: list[Faults] = []
    before: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}
    averages: dict[int, Tensor] = {}
    errors: list[BaseException] = []
    boxes = in_process(NUM_WORKERS, lambda transport: open_mailbox(transport, _PATIENCE_S, _TIMEOUT_S))

    def work(rank: int) -> None:
        undisturbed = Faults({})
        is_struck = undisturbed
        if rank == case.rank:
            is_struck = Faults(by_number, delay_s=0.02)
            planned.append(is_struck)
        ends = (undisturbed, is_struck) if befalls_replies else (is_struck, undisturbed)
        box = FaultyMailbox(boxes[rank], *ends)
        network = _model(rank)
        follower = Follower(policy_for(network, torch.optim.SGD(network.parameters(), lr=_LR), scheme, box))
        before[rank] = follower.vector.read()
        try:
            for _ in range(2 * STEPS):
                follower.step()
            follower.settle()
            after[rank] = follower.vector.read()
            follower.average_()
            averages[rank] = follower.vector.read()
        except BaseException as error:
            errors.append(error)
        finally:
            follower.close()

    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        list(pool.map(work, range(NUM_WORKERS)))
    broken = [
        f"a fault is an error of laconic's, in one line, not {type(error).__name__}: {error}"
        for error in errors
        if not isinstance(error, WorkerDiedError | LaunchError)
    ]
    if case.fault != "die" and len(averages) < NUM_WORKERS:
        broken.append("who lives goes on")
    if any(not torch.equal(model, next(iter(averages.values()))) for model in averages.values()):
        broken.append("replicas are equal after an average")
    if case.fault == "delay" or (case.fault == "truncate" and not befalls_replies):
        apart = (torch.stack(list(after.values())).double() - torch.stack(list(before.values())).double()).sum(0)
        if len(after) == NUM_WORKERS and float(apart.abs().max()) > _MASS_ATOL:
            broken.append("no mass is lost")
    return Outcome(broken, struck=any(faults.num_messages > case.number // 2 for faults in planned))
