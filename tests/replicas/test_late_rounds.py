"""A worker that is late under a dedicated server: the others go on without it, and its drift comes later."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic import Follower, SchemeError
from laconic.replicas import OuterRounds
from laconic.server import listener as listening
from laconic.server.client import ServerClient
from laconic.server.listener import Listener
from laconic.server.serve import check_wait
from laconic.transport import (
    Connection,
    Faults,
    FaultyCollectives,
    InProcess,
    Kind,
    Message,
    Push,
    connect,
    in_process,
)
from tests.gossiping import Learner, Small
from tests.logs import logged
from tests.replicas.test_rounds import outer, trained, wander
from tests.server.test_listener import serve_totals
from tests.virtual import one_core
from tests.workers import WorkerPool, wait_until

M = 4
LATE = 2
EXACT = "scheme:exchange=server,trigger=rounds(every=2)"
SPARSE = "sparseloco:every=2,rho=0.125,chunk=512,exchange=server"
WARM = "sparseloco:every=4,rho=0.125,chunk=512,warmup=2,delay=1,exchange=server"
FRAGMENTS = "scheme:quantize=bf16,exchange=server,trigger=rounds(every=4,fragments=2,delay=2),outer=nesterov"
TEXTS = [
    EXACT,
    FRAGMENTS,
    "scheme:quantize=bf16,exchange=server,trigger=rounds(every=2,delay=1,mix=0.5),outer=nesterov",
    SPARSE,
    WARM,
    "scheme:select=overlap(rho=0.1),memory=residual,exchange=server,trigger=rounds(every=2),outer=nesterov",
]


class LateEnd(FaultyCollectives):
    """An end of virtual workers one of whom misses rounds, by number: owners answer without what it says."""

    def __init__(self, inner: InProcess, missed: range) -> None:
        super().__init__(inner, Faults({}))
        self.is_late = False
        self._missed = missed
        self.num_rounds = 0

    @property
    def was_late(self) -> bool:
        return self.is_late

    def _is_missed(self) -> bool:
        missed = self.num_rounds in self._missed
        self.num_rounds += 1
        self.is_late = missed and self.rank == LATE
        return missed

    def push(self, push: Push) -> dict[int, Tensor]:
        heard = super().push(push)
        if self._is_missed():
            heard.pop(LATE, None)
        return heard

    def sum_gradients_(self, tensor: Tensor, kind: str) -> None:
        missed = self._is_missed()
        if missed and self.rank == LATE:
            tensor.zero_()
        super().sum_gradients_(tensor, kind)
        if missed:
            tensor.mul_(self.num_workers / (self.num_workers - 1))


def walk(
    text: str, missed: range, steps: int, load: list[dict[str, Any]] | None = None, save_at: int = -1
) -> list[tuple[Follower, list[Tensor], dict[str, Any]]]:
    """(follower, its anchor after each step, what was saved) of virtual workers whose models wander."""
    torch.manual_seed(3)
    first = Small()
    begin = 0 if load is None else load[0]["follower"]["step"]

    def work(transport: InProcess) -> tuple[Follower, list[Tensor], dict[str, Any]]:
        model = copy.deepcopy(first)
        end = LateEnd(transport, missed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        follower = Follower(OuterRounds(model, optimizer, outer(text), end, in_background=False))
        saved: dict[str, Any] = {}
        if load is not None:
            model.load_state_dict(load[transport.rank]["model"])
            follower.load_state_dict([each["follower"] for each in load])
            end.num_rounds = load[transport.rank]["rounds"]
        anchors = []
        for number in range(begin, steps):
            wander(model, transport.rank, number)
            follower.step()
            anchors.append(anchor_of(follower))
            if number + 1 == save_at:
                saved = {"model": copy.deepcopy(model.state_dict()), "follower": follower.state_dict()}
                saved["rounds"] = end.num_rounds
        return follower, anchors, saved

    with one_core():
        return in_process(M, work)


def anchor_of(follower: Follower) -> Tensor:
    return torch.cat([anchor.reshape(-1) for anchor in follower.state_dict()["anchor"].values()])


@pytest.mark.parametrize("text", TEXTS)
def test_anchors_are_the_same_everywhere_whoever_is_late(text: str) -> None:
    everyone = walk(text, range(3, 6), 12)
    for follower, anchors, _ in everyone:
        assert all(map(torch.equal, anchors, everyone[0][1]))
        assert bool(follower.stats().late_rounds) == (follower.rank == LATE)
        assert "without it" in str(follower.stats()) or follower.rank != LATE
    if text == EXACT:
        in_time = walk(text, range(0), 12)
        assert not torch.equal(in_time[0][1][-1], everyone[0][1][-1])  # it was left out


@pytest.mark.parametrize("when", ["", ",delay=1", ",fragments=2,delay=1,mix=0.5"])
def test_the_drift_of_a_late_worker_is_heard_in_its_next_turn(when: str) -> None:
    """anchor = where all began - mean over the others of what they drifted, and then - what the late one did / M."""
    text = EXACT.replace("every=2", "every=2" + when)
    torch.manual_seed(3)
    first = Small()
    began = trained(first)

    def work(transport: InProcess) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model = copy.deepcopy(first)
        # A round of buffers, then one of the only fragment, or one of each of two.
        rounds = range(0, 3 if "fragments" in when else 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        follower = Follower(OuterRounds(model, optimizer, outer(text), LateEnd(transport, rounds)))
        wander(model, transport.rank, 0)
        drift = began - trained(model)
        for _ in range(2):
            follower.step()
        follower.settle()
        once, kept = anchor_of(follower), anchor_of(follower) - trained(model)
        for _ in range(2):
            follower.step()
        follower.settle()
        return drift, once, kept, anchor_of(follower)

    with one_core():
        found = in_process(M, work, num_servers=1)
    drifts = [drift for drift, _, _, _ in found]
    others = torch.stack([drift for rank, drift in enumerate(drifts) if rank != LATE]).mean(0)
    for rank, (drift, once, kept, twice) in enumerate(found):
        assert torch.allclose(once, began - others, atol=1e-6)  # float32 sums of 0.01
        if rank == LATE:
            assert torch.allclose(kept, drift, atol=1e-6)
        if "mix" not in when:  # where the others keep half of theirs, that is heard again
            assert torch.allclose(twice, began - others - drifts[LATE] / M, atol=1e-6)


def test_what_a_late_worker_keeps_is_as_it_was_before() -> None:
    before, after = (walk(SPARSE, range(2, 4), steps, save_at=steps) for steps in (2, 4))
    for rank, ((_, _, then), (_, _, now)) in enumerate(zip(before, after, strict=True)):
        kept = [saved["follower"]["session"]["memory"]["residual"] for saved in (then, now)]
        assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0]) == (rank == LATE)


@pytest.mark.parametrize("text", [FRAGMENTS, WARM])
def test_a_run_that_is_saved_while_a_worker_is_late_goes_on_as_it_would_have(text: str) -> None:
    whole = walk(text, range(3, 6), 12, save_at=7)
    saved = [each for _, _, each in whole]
    assert any(result["missed"] for result in saved[LATE]["follower"]["pending"]) or "sparse" in text
    resumed = walk(text, range(3, 6), 12, load=saved)
    for (follower, anchors, _), (again, anchors_again, _) in zip(whole, resumed, strict=True):
        assert torch.equal(follower.vector.read(), again.vector.read()) and torch.equal(anchors[-1], anchors_again[-1])
        assert follower.stats().late_rounds == again.stats().late_rounds


def test_a_late_worker_that_is_not_finite_spoils_nobody() -> None:
    torch.manual_seed(3)
    first = Small()

    def work(transport: InProcess) -> Follower:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        follower = Follower(OuterRounds(model, optimizer, outer(EXACT), LateEnd(transport, range(0, 2))))
        for number in range(6):
            wander(model, transport.rank, number)
            if transport.rank == LATE and number == 0:
                model.head.weight.data[0, 0] = torch.nan
            follower.step()
        return follower

    with one_core(), logged("goes back to the anchor"):
        found = in_process(M, work, num_servers=1)
    assert all(torch.equal(follower.vector.read(), found[0].vector.read()) for follower in found)
    assert bool(found[0].vector.read().isfinite().all()) and found[0].stats().rounds == 3  # none was skipped


@pytest.mark.parametrize("text", [EXACT, SPARSE])
def test_a_late_worker_that_is_not_finite_heals_in_its_next_round(text: str) -> None:
    torch.manual_seed(3)
    first = Small()

    def work(transport: InProcess) -> list[bool]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        follower = Follower(OuterRounds(model, optimizer, outer(text), LateEnd(transport, range(100))))
        finite = []
        for number in range(6):
            wander(model, transport.rank, number)
            if transport.rank == LATE and number == 0:
                model.head.weight.data[0, 0] = torch.nan
            follower.step()
            finite.append(bool(follower.vector.read().isfinite().all()))
        assert follower.stats().skipped_steps == 0
        return finite

    with one_core(), logged("goes back to the anchor"):
        finite = in_process(M, work, num_servers=1)
    assert finite[LATE] == [False] + [True] * 5 and all(all(finite[rank]) for rank in range(M) if rank != LATE)


def _talk(
    work: Callable[[ServerClient], None],
    *,
    wait_budget_s: float = 0.05,
    timeout_s: float = 20,
    other: Callable[[Connection], object] | None = None,
) -> Listener:
    """The listener afterwards of two workers who add up in rounds, the second by `other` if that is given."""
    listener = Listener(2, timeout_s, wait_budget_s=wait_budget_s)
    listener.longest = 1 << 25
    server = serve_totals(listener)
    wrong: list[Exception] = []

    def one(rank: int) -> None:
        try:
            if other is not None and rank == 1:
                link = connect(listener.address, rank, "server 0", timeout_s)
                other(link)
                link.close()
                return
            client = ServerClient(rank, 2, [listener.address], "", timeout_s, 1 << 23)
            work(client)
            client.close()
        except Exception as error:
            wrong.append(error)

    workers = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in workers:
        thread.start()
    for thread in [*workers, server]:
        thread.join(30)
        assert not thread.is_alive()
    assert not wrong
    return listener


def _sum(client: ServerClient, num_entries: int = 1) -> float:
    ones = torch.ones(num_entries)
    client.sum_gradients_(ones, "dense")
    return float(ones[-1])


@pytest.fixture
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.usefixtures("_loopback")
def test_who_speaks_late_hears_what_the_others_heard() -> None:
    others_went_on = threading.Event()
    sums: dict[int, list[tuple[float, bool]]] = {0: [], 1: []}

    def work(client: ServerClient) -> None:
        for _ in range(3):
            if client.rank == 1:
                others_went_on.wait(20)
            sums[client.rank].append((_sum(client), client.was_late))
        others_went_on.set()
        sums[client.rank].append((float(client.total(torch.ones(1))), client.was_late))  # which waits for all

    listener = _talk(work)
    assert sums == {0: [(1, False)] * 3 + [(2, False)], 1: [(1, True)] * 3 + [(2, False)]}
    assert listener.late == {1: 3} and not listener.lost


@pytest.mark.usefixtures("_loopback")
def test_who_is_far_behind_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_MOST_MISSED", 2)
    others_went_on = threading.Event()
    sums: dict[int, list[float]] = {0: [], 1: []}

    def work(client: ServerClient) -> None:
        for number in range(3):
            if client.rank == 1:
                others_went_on.wait(20)
            elif number == 2:
                others_went_on.set()
            sums[client.rank].append(_sum(client))

    listener = _talk(work, wait_budget_s=0.0)
    assert sums[0] == sums[1] == [1, 1, 2]
    assert listener.late == {1: 2} and not listener.lost


@pytest.mark.usefixtures("_loopback")
def test_who_is_slow_to_take_an_answer_holds_up_nobody() -> None:
    others_went_on = threading.Event()
    num_entries = 2_000_000  # more than a socket holds
    sums: dict[int, list[float]] = {0: [], 1: []}

    def work(client: ServerClient) -> None:
        sums[0] = [_sum(client, num_entries) for _ in range(3)]
        others_went_on.set()

    def slow(link: Connection) -> None:
        for _ in range(3):
            link.send(Message(Kind.SUM, payload=torch.ones(num_entries)))
            others_went_on.wait(20)
            reply = link.receive({Kind.SUM: 1 << 23, Kind.LATE: 1 << 23}, 20)
            sums[1].append(float(reply.payload[-1]) * 2 / reply.living)
        link.send(Message(Kind.CLOSE))
        link.receive({Kind.CLOSE: 0}, 20)

    listener = _talk(work, other=slow)
    assert sums[0] == sums[1] == [2, 1, 1]
    assert listener.late == {1: 2} and not listener.lost


@pytest.mark.usefixtures("_loopback")
def test_who_is_late_and_then_silent_is_lost() -> None:
    others_went_on = threading.Event()
    sums: list[float] = []

    def work(client: ServerClient) -> None:
        sums.extend(_sum(client) for _ in range(2))
        sums.append(float(client.total(torch.ones(1))))
        others_went_on.set()

    listener = _talk(work, timeout_s=0.5, other=lambda link: others_went_on.wait(20))
    assert sums in ([1, 1, 1], [1, 2, 1])  # of one living, as many as there were
    assert listener.lost == {1: "was silent for 0.5 s before the first step"} and not listener.late


@pytest.mark.parametrize(
    ("text", "wait_budget_s", "num_servers", "message"),
    [
        ("topk:rho=0.1,exchange=server", 1.0, 1, "a gradient cannot come later"),
        (EXACT, -1.0, 1, "give seconds"),
        (EXACT, 1.0, 2, "a wait budget is one server's"),
    ],
)
def test_a_wait_budget_that_makes_no_sense_is_refused(
    text: str, wait_budget_s: float, num_servers: int, message: str
) -> None:
    with pytest.raises(SchemeError, match=message):
        check_wait(text, wait_budget_s, num_servers)


STOPS_AT = 4
STEPS = 24


def _learn_and_stop(text: str, progress: Path) -> tuple[list[float], Tensor, int, dict[int, int]]:
    """(losses, anchor, late rounds of this worker, who was late) of a rank; the last one stops itself for a while."""
    if dist.get_rank() == 0:
        stats = laconic.serve(text, servers=[0], wait_budget_s=0.2)
        assert not stats.lost
        return [], torch.empty(0), 0, stats.late
    learner = Learner(text, dist.get_rank(), partial(laconic.follow, servers=[0]), 0.05)
    losses = []
    for number in range(STEPS):
        if number == STOPS_AT and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        losses.append(learner.step(number))
        if number == 15:
            learner.follower.load_state_dict(learner.follower.state_dict())
        if dist.get_rank() == 1:
            progress.write_text(f"{number}")
    learner.follower.settle()
    anchor = anchor_of(learner.follower)
    learner.follower.average_()
    learner.follower.close()
    return losses, anchor, learner.follower.stats().late_rounds, {}


@pytest.mark.parametrize("text", [EXACT, WARM])
def test_a_stopped_worker_comes_back_and_its_drift_is_heard(text: str, tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    pool = WorkerPool(4)
    try:
        for pipe in pool.pipes:
            pipe.send((_learn_and_stop, (text, progress)))
        # The others have gone on.
        assert wait_until(lambda: progress.exists() and int(progress.read_text() or 0) >= STOPS_AT + 6)
        assert pool.processes[3].is_alive()
        os.kill(pool.processes[3].pid, signal.SIGCONT)
        told = []
        for pipe in pool.pipes:
            assert pipe.poll(120), "it hangs"
            ok, value = pipe.recv()
            assert ok, value
            told.append(value)
    finally:
        pool.close()
    (*_, late), *workers = told
    assert late[2] >= 2 and workers[2][2] >= 1
    for losses, anchor, _, _ in workers:
        assert torch.equal(anchor, workers[0][1])
        assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
