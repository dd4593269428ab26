"""Replica groups under torchft, by a manager in threads: whatever fails, drifts are counted once, or stay.

tests/integrations/test_torchft.py has the real one.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.integrations.torchft import ReplicaFollower, follow

SIZE = 3
EXACT = "local:every=4,quantize=none"
QUANTIZED = "streaming:every=8,fragments=2,delay=2,bits=4"


@dataclass
class Faults:
    """The ranks that something happens to in one round."""

    unhealed: set[int] = field(default_factory=set)  # cannot fetch the state that would heal them
    cardless: set[int] = field(default_factory=set)  # lose a connection before they know who sends what
    cut: set[int] = field(default_factory=set)  # lose it before all drifts have come
    uncommitted: set[int] = field(default_factory=set)  # get them, and do not commit
    apart: set[int] = field(default_factory=set)  # are not in the quorum of the others
    dead: set[int] = field(default_factory=set)  # have been killed, and start again


@dataclass
class Quorum:
    """What replica groups in threads share."""

    faults: Sequence[Faults]
    size: int = SIZE
    managers: dict[int, FakeManager] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meeting = threading.Barrier(self.size, timeout=60)
        self.rows: dict[int, Tensor | None] = {}

    def group_of(self, rank: int, number: int) -> list[int]:
        """The ranks in the quorum of this one."""
        apart = self.faults[number].apart
        return [rank] if rank in apart else [other for other in range(self.size) if other not in apart]


class FakeManager:
    """torchft's Manager and its process group, as far as follow() asks for them."""

    def __init__(self, quorum: Quorum, rank: int, number: int = 0) -> None:
        self._quorum = quorum
        self._rank = rank
        self._number = number - 1  # of the round
        self._group: list[int] = []
        self._error: Exception | None = None
        self._has_failed = False
        self._num_gathers = 2
        self.committed = self.num_aborted = 0
        quorum.managers[rank] = self

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None:
        self.load, self.save = load_state_dict, state_dict

    def start_quorum(self) -> None:
        """Wait for all, and heal who is behind, and at step 0 all but the first, from the first who is not."""
        quorum = self._quorum
        self._error, self._num_gathers, self._number = None, 0, self._number + 1
        self._group = quorum.group_of(self._rank, self._number)
        quorum.meeting.wait()
        latest = max(quorum.managers[rank].committed for rank in self._group)
        source = next(rank for rank in self._group if quorum.managers[rank].committed == latest)
        is_behind = self.committed < latest or (latest == 0 and self._rank != source)
        state = copy.deepcopy(quorum.managers[source].save()) if is_behind else None
        quorum.meeting.wait()
        if state is not None and self._rank in quorum.faults[self._number].unhealed:
            self._error = TimeoutError("the state has not come")
        elif state is not None:
            self.committed = latest
            self.load(state)

    def errored(self) -> Exception | None:
        return self._error

    def participating_rank(self) -> int:
        return self._group.index(self._rank)

    def current_step(self) -> int:
        return self.committed

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.committed = state_dict["step"]

    def report_error(self, e: Exception) -> None:
        self._error = e

    def hang_up(self) -> None:
        """Let the others get what they wait for in this round."""
        while self._num_gathers < 2:
            self._gathered(None)

    def should_commit(self) -> bool:
        self.hang_up()
        uncommitted = self._quorum.faults[self._number].uncommitted
        commits = self._error is None and len(self._group) > 1 and self._rank not in uncommitted
        self.committed += commits
        return commits

    def getBackendName(self) -> str:
        return "torchft-gloo"

    def size(self) -> int:
        return len(self._group)

    def abort(self) -> None:
        self.num_aborted += 1

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> FakeManager:
        faults = self._quorum.faults[self._number]
        self._has_failed = self._rank in (faults.cardless, faults.cut)[self._num_gathers]
        for row, sent in zip(output_tensors[0], self._gathered(input_tensors[0]), strict=True):
            self._has_failed |= sent is None  # whose rank has hung up
            if sent is not None:
                row.copy_(sent)
        return self

    def _gathered(self, own: Tensor | None) -> list[Tensor | None]:
        self._num_gathers += 1
        self._quorum.rows[self._rank] = own
        self._quorum.meeting.wait()
        rows = [self._quorum.rows[rank] for rank in self._group]
        self._quorum.meeting.wait()
        return rows

    def wait(self) -> None:
        if self._has_failed:
            raise RuntimeError("connection closed by peer")


def in_threads(size: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def add_(model: nn.Module, change: Tensor) -> None:
    with torch.no_grad():
        nn.utils.vector_to_parameters(flat(model) + change, model.parameters())


def followed(quorum: Quorum, rank: int, scheme: str, number: int = 0) -> tuple[nn.Module, ReplicaFollower]:
    """A new process."""
    model = model_of()
    manager = FakeManager(quorum, rank, number)
    return model, follow(manager, manager, model, torch.optim.SGD(model.parameters(), lr=0.1), scheme)


def anchor_of(follower: ReplicaFollower) -> Tensor:
    anchors = follower.state_dict()["anchors"]
    return torch.cat([anchors[number]["anchor"] for number in sorted(anchors)])


@dataclass
class Run:
    """What every process had after each round."""

    models: list[list[Tensor]]
    anchors: list[list[Tensor]]
    steps: list[list[int]]  # of torchft
    followers: list[ReplicaFollower]


def run_of(faults: Sequence[Faults], scheme: str, every: int, learned: Tensor) -> Run:
    """Train in threads, a round every so many steps; `learned` is by step and rank."""
    quorum = Quorum(faults)
    empty = torch.empty(0)
    run = Run([[empty] * SIZE for _ in faults], [[empty] * SIZE for _ in faults], [[0] * SIZE for _ in faults], [])
    followers: dict[int, ReplicaFollower] = {}

    def work(rank: int) -> None:
        torch_lock.acquire()
        model, follower = followed(quorum, rank, scheme)
        torch_lock.release()
        for step in range(len(faults) * every):
            number = step // every
            if step % every == 0 and rank in faults[number].dead:
                quorum.managers[rank].hang_up()
                torch_lock.acquire()
                model, follower = followed(quorum, rank, scheme, number)
                torch_lock.release()
            add_(model, learned[step, rank])
            follower.step(tokens=rank + 1)
            if (step + 1) % every == 0:
                run.models[number][rank], run.anchors[number][rank] = flat(model), anchor_of(follower)
                run.steps[number][rank] = quorum.managers[rank].committed
        followers[rank] = follower

    torch_lock = threading.Lock()  # models are drawn from one seed, which threads share
    in_threads(SIZE, work)
    assert not quorum.meeting.broken
    run.followers = [followers[rank] for rank in range(SIZE)]
    return run


@dataclass(frozen=True)
class Account:
    """An anchor as a plain account has it, and up to which step it holds what each process has learned."""

    anchor: Tensor
    until: tuple[int, ...]
    step: int  # of torchft


def accounts_of(faults: Sequence[Faults], every: int, learned: Tensor) -> list[list[Tensor]]:
    """Every model after each round: its anchor, and what its process has learned that is not in there."""
    accounts = [Account(flat(model_of()), (0,) * SIZE, 0)] * SIZE
    begun = [0] * SIZE  # the step from which a process has trained on its anchor
    is_new = [True] * SIZE  # it has not been healed
    models = []
    for number, fault in enumerate(faults):
        now = (number + 1) * every
        for rank in fault.dead:
            accounts[rank], begun[rank], is_new[rank] = Account(flat(model_of()), (0,) * SIZE, 0), now - every, True
        latest = max(account.step for account in accounts)
        source = next(rank for rank in range(SIZE) if accounts[rank].step == latest)
        is_current = []
        for rank in range(SIZE):
            is_behind = accounts[rank].step < latest or (latest == 0 and rank != source)
            is_current.append(not is_behind or rank not in fault.unhealed)
            if is_current[rank]:
                accounts[rank] = accounts[source]
                begun[rank] = now if is_behind and is_new[rank] else begun[rank]
                is_new[rank] = False
        account = accounts[source]
        since = [max(until, first) for until, first in zip(account.until, begun, strict=True)]
        owed = [learned[first:now, rank].sum(0) for rank, first in enumerate(since)]
        senders = [rank for rank in range(SIZE) if is_current[rank] and since[rank] < now]
        failing = fault.uncommitted | (fault.cut if senders else fault.cardless)
        if senders and fault.cardless:
            failing = set(range(SIZE))
        anchor, until = account.anchor, account.until
        if senders:
            tokens = torch.tensor([(now - since[rank]) * (rank + 1.0) for rank in senders])
            anchor = anchor + (torch.stack([owed[rank] for rank in senders]) * tokens[:, None]).sum(0) / tokens.sum()
            until = tuple(now if rank in senders else u for rank, u in enumerate(until))
        committed = Account(anchor, until, latest + 1)
        accounts = [committed if is_current[r] and r not in failing else accounts[r] for r in range(SIZE)]
        models.append(
            [
                accounts[rank].anchor + learned[max(accounts[rank].until[rank], begun[rank]) : now, rank].sum(0)
                for rank in range(SIZE)
            ]
        )
    return models


def drawn(seed: int, rounds: int) -> list[Faults]:
    draw = random.Random(seed)

    def some() -> set[int]:
        return {rank for rank in range(SIZE) if draw.random() < 0.15}

    faults = [Faults(some(), some() if draw.random() < 0.2 else set(), some(), some()) for _ in range(rounds)]
    for number in draw.sample(range(1, rounds), 2):
        faults[number].dead.add(draw.randrange(SIZE))
    return [*faults, Faults(), Faults()]


@pytest.mark.parametrize("seed", range(20))
def test_every_drift_is_counted_once_or_kept_whatever_fails(seed: int) -> None:
    faults = drawn(seed, rounds=12)
    learned = torch.randn(
        len(faults) * 4, SIZE, flat(model_of()).numel(), generator=torch.Generator().manual_seed(seed)
    )
    run = run_of(faults, EXACT, 4, learned)
    for number, expected in enumerate(accounts_of(faults, 4, learned)):
        for rank in range(SIZE):
            torch.testing.assert_close(
                run.models[number][rank], expected[rank], atol=1e-4, rtol=1e-4, msg=f"{number} {rank}"
            )  # sums of 56 steps in float32
    assert max(follower.stats().failed_rounds for follower in run.followers) > 0


@pytest.mark.parametrize("seed", range(10))
def test_anchors_are_equal_bit_for_bit_among_all_who_are_as_far(seed: int) -> None:
    faults = drawn(100 + seed, rounds=12)
    learned = 0.1 * torch.randn(len(faults) * 4, SIZE, flat(model_of()).numel(), generator=torch.Generator())
    run = run_of(faults, QUANTIZED, 4, learned)
    for anchors, steps in zip(run.anchors, run.steps, strict=True):
        for step in set(steps) - {0}:
            alike = [anchor for anchor, its in zip(anchors, steps, strict=True) if its == step]
            assert all(torch.equal(anchor, alike[0]) for anchor in alike)
    assert run.steps[-1][0] == run.steps[-1][1] == run.steps[-1][2] > 4


def test_a_process_that_committed_apart_from_the_others_comes_back_to_their_anchors() -> None:
    """As many rounds, and others: torchft sees no difference, and heals nobody."""
    faults = [Faults() for _ in range(6)]
    faults[2].uncommitted |= {0, 1}  # rank 2 alone commits
    faults[3].apart.add(2)  # and is stopped, while the others commit another round
    learned = torch.randn(24, SIZE, flat(model_of()).numel(), generator=torch.Generator().manual_seed(0))
    run = run_of(faults, EXACT, 4, learned)
    assert run.steps == [[1] * 3, [2] * 3, [2, 2, 3], [3] * 3, [4, 4, 2], [5] * 3]
    weights = torch.tensor([1.0, 2.0])[:, None] / 3
    moved = (weights * learned[16:20, :2].sum(0)).sum(0)
    torch.testing.assert_close(run.anchors[4][0] - run.anchors[3][0], moved, atol=1e-4, rtol=1e-4)
    assert not torch.equal(run.anchors[3][2], run.anchors[3][0])
    assert torch.equal(run.anchors[4][1], run.anchors[4][0])  # rank 2's drift is from another anchor, and left out
    assert all(torch.equal(anchor, run.anchors[5][0]) for anchor in run.anchors[5])
    assert run.followers[2].stats().healed == 2 and run.followers[0].stats().healed == 0


def test_the_minority_that_goes_back_discards_no_run() -> None:
    """Where the others die before it is healed, theirs is the run that is lost, and its own goes on."""
    faults = [Faults() for _ in range(8)]
    faults[2].uncommitted |= {0, 1}
    faults[3].apart.add(2)
    faults[5].dead |= {0, 1}
    learned = torch.ones(32, SIZE, flat(model_of()).numel())
    run = run_of(faults, EXACT, 4, learned)
    first = flat(model_of())
    for anchor in run.anchors[7]:
        assert float((anchor - first).min()) > 16


@pytest.mark.parametrize("fault", ["cardless", "cut"])
def test_who_fails_a_round_hangs_up_so_that_nobody_waits_for_it(fault: str) -> None:
    quorum = Quorum([Faults(**{fault: {0}}), Faults()], size=2)

    def work(rank: int) -> None:
        model, follower = followed(quorum, rank, EXACT)
        for _ in range(8):
            add_(model, torch.ones_like(flat(model)))
            follower.step()

    in_threads(2, work)
    assert quorum.managers[0].num_aborted == 1


def test_two_processes_that_continue_from_one_state_lose_no_drift(caplog: pytest.LogCaptureFixture) -> None:
    quorum = Quorum([Faults()] * 4, size=2)
    models = [model_of(), model_of()]
    saved: list[Any] = []
    is_saved = threading.Barrier(2, timeout=60)
    begun = flat(models[0]).clone()

    def work(rank: int) -> None:
        model = models[rank]
        for number in (0, 2):
            manager = FakeManager(quorum, rank, number)
            manager.committed = number
            follower = follow(manager, manager, model, torch.optim.SGD(model.parameters(), lr=0.1), EXACT)
            if number:
                follower.load_state_dict(copy.deepcopy(saved[0]))
            for _ in range(8):
                add_(model, torch.full_like(flat(model), float(10**rank) if number else 0.0))
                follower.step()
            if rank == 0 and not number:
                saved.append(follower.state_dict())
            is_saved.wait()

    in_threads(2, work)
    assert caplog.text.count("another process continues from the same state") == 1
    # The first round has rank 0's drift alone, the second both: (4 + (8 * 10 - 0)) where rank 1 weighs 8 steps.
    moved = [float((flat(model) - begun).mean()) for model in models]
    assert moved[0] == pytest.approx(moved[1])
    assert moved[0] == pytest.approx(4 + (4 * 1 * 4 + 80 * 8) / 12)


@pytest.mark.parametrize("tokens", [12.5, -1, 1 << 62, "many"])
def test_tokens_that_are_no_count_are_one_line(tokens: Any) -> None:
    _, follower = followed(Quorum([Faults()], size=1), 0, EXACT)
    with pytest.raises(laconic.SchemeError, match="give a whole number, 0 or more"):
        follower.step(tokens)


def test_a_new_process_takes_the_anchors_and_drops_what_it_learned_elsewhere() -> None:
    quorum = Quorum([Faults(), Faults()], size=2)
    models = [model_of(0), model_of(1)]  # as one that joins may have been built from another seed
    followers: dict[int, ReplicaFollower] = {}

    def work(rank: int) -> None:
        manager = FakeManager(quorum, rank)
        followers[rank] = follow(manager, manager, models[rank], torch.optim.SGD(models[rank].parameters()), EXACT)
        for _ in range(8):
            followers[rank].step()

    in_threads(2, work)
    stats = followers[1].stats()
    assert (stats.healed, stats.failed_rounds, stats.rounds, stats.num_participants) == (1, 0, 2, 2)
    assert torch.equal(flat(models[0]), flat(models[1]))
    assert followers[0].stats().bytes_out == followers[1].stats().bytes_in > 4 * flat(models[0]).numel()


def test_another_scheme_ends_the_process_that_joins_with_it_in_one_line() -> None:
    quorum = Quorum([Faults()], size=2)
    lines = []

    def work(rank: int) -> None:
        model, manager = nn.Linear(2, 2), FakeManager(quorum, rank)
        scheme = "local:every=4" if rank else EXACT
        follower = follow(manager, manager, model, torch.optim.SGD(model.parameters(), lr=0.1), scheme)
        try:
            for _ in range(4):
                follower.step()
        except laconic.PeerError as error:
            lines.append((rank, str(error)))
            manager.report_error(error)
            manager.should_commit()  # for the other thread, which meets it

    in_threads(2, work)
    [(rank, line)] = lines
    assert rank == 1 and line.startswith("the scheme is local:every=4 here") and "\n" not in line


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("streaming:every=16,fragments=4,delay=4", "a delay below that share"),
        ("streaming:every=15,fragments=2,delay=1", "a multiple of 2"),
        ("local:every=4,warmup=3", "leave warmup out"),
        ("topk", "use one like streaming"),
    ],
)
def test_what_replica_groups_cannot_take_is_one_line(scheme: str, words: str) -> None:
    with pytest.raises(laconic.SchemeError, match=words):
        followed(Quorum([], size=1), 0, scheme)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"_use_async_quorum": True}, "use_async_quorum=False"),
        ({"_init_sync": False}, "init_sync=True"),
        ({"getBackendName": lambda: "torchft-nccl"}, "give torchft's ProcessGroupGloo"),
        ({"_timeout": timedelta(seconds=60), "_quorum_timeout": timedelta(seconds=60)}, "at least twice"),
    ],
)
def test_a_manager_with_other_settings_is_one_line(setting: dict[str, Any], words: str) -> None:
    model, manager = model_of(), FakeManager(Quorum([], size=1), 0)
    vars(manager).update(setting)
    with pytest.raises(laconic.SchemeError, match=words):
        follow(manager, manager, model, torch.optim.SGD(model.parameters(), lr=0.1), EXACT)


class Alone(FakeManager):
    """The only replica group of its quorum."""

    def should_commit(self) -> bool:
        self.committed += 1
        return True


def alone(scheme: str = "streaming:every=4,fragments=2,delay=1", seed: int = 0) -> tuple[nn.Module, ReplicaFollower]:
    model, manager = model_of(seed), Alone(Quorum([Faults()] * 20, size=1), 0)
    return model, follow(manager, manager, model, torch.optim.SGD(model.parameters(), lr=0.1), scheme)


def test_a_checkpoint_continues_bit_for_bit() -> None:
    learned = 0.1 * torch.randn(40, flat(model_of()).numel(), generator=torch.Generator().manual_seed(3))
    model, follower = alone()
    for step in range(20):
        add_(model, learned[step])
        follower.step()
    follower.close()  # the round that is open
    saved = copy.deepcopy(follower.state_dict())
    manager = Alone(Quorum([Faults()] * 20, size=1), 0)
    manager.committed = follower.stats().rounds
    again = model_of(5)
    again.load_state_dict(model.state_dict())
    continued = follow(manager, manager, again, torch.optim.SGD(again.parameters(), lr=0.1), str(follower.scheme))
    continued.load_state_dict(saved)
    for its_model, its_follower in ((model, follower), (again, continued)):
        for step in range(20, 40):
            add_(its_model, learned[step])
            its_follower.step()
    assert torch.equal(flat(model), flat(again)) and torch.equal(anchor_of(follower), anchor_of(continued))
    with pytest.raises(laconic.StateError, match="give all the same"):
        alone("local:every=4")[1].load_state_dict(saved)


def test_a_process_restored_from_before_a_drift_was_counted_drops_what_came_of_it() -> None:
    """Its drift since the checkpoint is in the others' anchors: kept, it would be counted twice."""
    quorum = Quorum([Faults()] * 4, size=2)
    models = [model_of(), model_of()]
    followers: list[ReplicaFollower] = []
    lock = threading.Lock()

    def work(rank: int) -> None:
        manager = FakeManager(quorum, rank)
        optimizer = torch.optim.SGD(models[rank].parameters(), lr=0.1)
        follower = follow(manager, manager, models[rank], optimizer, EXACT)
        for step in range(16):
            if rank == 1 and step == 8:
                saved = copy.deepcopy((models[1].state_dict(), follower.state_dict()))
            if rank == 1 and step == 12:
                with lock:
                    models[1] = model_of(1)
                manager = FakeManager(quorum, 1, 3)
                manager.committed = 2
                follower = follow(manager, manager, models[1], torch.optim.SGD(models[1].parameters(), lr=0.1), EXACT)
                models[1].load_state_dict(saved[0])
                follower.load_state_dict(saved[1])
            add_(models[rank], torch.full_like(flat(models[rank]), 0.1 * (rank + 1)))
            follower.step()
        with lock:
            followers.append(follower)

    in_threads(2, work)
    assert torch.equal(anchor_of(followers[0]), anchor_of(followers[1]))
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_buffers_of_norms_have_rounds_of_their_own_and_become_their_mean() -> None:
    quorum = Quorum([Faults()] * 4, size=2)
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]

    def work(rank: int) -> None:
        manager, norm = FakeManager(quorum, rank), norms[rank]
        follower = follow(manager, manager, norm, torch.optim.SGD(norm.parameters(), lr=0.1), "local:every=4")
        for step in range(8):
            if step in (4, 5):
                norm.running_mean.fill_(rank + 1.0)  # type: ignore[union-attr]
            follower.step()

    in_threads(2, work)
    assert all(torch.equal(norm.running_mean, torch.full((4,), 1.5)) for norm in norms)  # type: ignore[arg-type]
