"""The server exchange: shares, answers, votes, unions; dedicated servers over real processes, and deaths."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import virtual
from ddp_training import start
from laconic import FrameError, PeerError, Scheme, ServerLostError, Session, attach, parse, serve
from laconic.exchange import Server, Shares
from laconic.layout import Bucket, Layout
from laconic.measure.records import RECORDS, read
from laconic.measure.train import Job, verdict, work_in_process
from laconic.measure.train.result import Result
from laconic.memory import Ledger
from laconic.paths import PhaseClock, path_for
from laconic.paths.push_pull import PushPull
from laconic.quantize import Sign, Trits
from laconic.recipes import RECIPES
from laconic.scheme import part
from laconic.server.client import ServerClient
from laconic.server.owner import Owner
from laconic.server.serve import exchange_addresses, greeting
from laconic.transport import (
    Count,
    Fault,
    Faults,
    FaultyCollectives,
    Group,
    InProcess,
    Push,
    in_process,
    own_group,
    silent_end,
    world,
)
from laconic.transport.push_pull import Rounds, TwoHops
from laconic.wire import FrameShape, longest_frame
from virtual import LAYOUTS, gradients, one_step
from workers import WorkerPool, flat_parameters


def made(text: str) -> Scheme:
    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    return scheme


@pytest.mark.parametrize("num_shares", [1, 2, 3, 8, 64])
def test_shares_are_pieces_of_every_parameter_and_lead_back(num_shares: int) -> None:
    layout = Layout.of(["a", "empty", "b", "c", "d"], [1000, 0, 7, 1, 333])
    shares = Shares(layout, num_shares)
    for own in shares.layouts:
        assert own.names == layout.names
        assert all(
            abs(mine.num_entries - all_.num_entries / num_shares) < 1
            for mine, all_ in zip(own.spans, layout.spans, strict=True)
        )
    positions = torch.randperm(layout.num_entries, generator=torch.Generator().manual_seed(0))[:500].sort().values
    order, places = shares.cut(positions)
    back = shares.positions(places)
    assert torch.equal(back, positions[order])
    assert all(bool((at[1:] > at[:-1]).all()) for at in places)
    everything = shares.positions([torch.arange(own.num_entries) for own in shares.layouts])
    assert torch.equal(everything.sort().values, torch.arange(layout.num_entries))


def test_a_job_with_servers_fails_with_a_server_or_with_all_workers() -> None:
    job = Job(scheme="overlap", servers=1, workers=3)
    assert verdict([None, -9, None, 0], job) == verdict([0, -9, 0, 1], job) == 0
    assert verdict([-9, None, None, None], job) == 137 and verdict([0, -9, 1, 1], job) == 1
    assert verdict([0, 3, 3, 3], job) == 3 and verdict([None, 1, 1, 1], job) == 1
    assert verdict([0, -9, None, None], Job(scheme="dense", servers=1, workers=3)) == 137  # nobody there to notice


def test_virtual_workers_train_and_lie_on_request(tmp_path: Path) -> None:
    told: list[Result] = []
    for flipped in (0, 3):
        out = tmp_path / str(flipped)
        job = Job(scheme="sign", workers=3, servers=1, steps=3, batch=2, in_process=True, flipped=flipped, out=out)
        assert work_in_process(job, told.append, lambda said: None) == 0
        assert [fact["step"] for fact in read(out, "step")] == [1, 2, 3]
    honest, lying = told
    assert honest.loss < lying.loss and honest.server_bytes_out == 3 * honest.bytes_in


def _answer(text: str, given: list[Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    """(what every worker applies, the bytes of the one answer)."""

    def work(transport: InProcess) -> tuple[Tensor, int]:
        session = Session(made(text), transport)
        flat = given[transport.rank].clone()
        session.exchange_(Bucket(0, layout, flat, is_last=True))
        return flat, session.stats().by_kind["down"].bytes_in

    (flat, num_bytes), *_ = in_process(len(given), work, num_servers=1)
    return flat, torch.tensor(num_bytes)


@pytest.mark.parametrize("rho", [0.001, 0.05, 0.3, 0.9])
def test_answers_take_the_smallest_form(rho: float) -> None:
    n = 4096
    layout, draw = Layout.of(["w"], [n]), torch.Generator().manual_seed(1)
    given = [torch.randn(n, generator=draw) for _ in range(3)]
    flat, num_bytes = _answer(f"topk:rho={rho},quantize=none,exchange=server", given, layout)
    size = int((flat != 0).sum())
    quantize = made("topk:quantize=none").frame_code
    assert (
        0.8 < num_bytes / min(FrameShape(n, size, 0, quantize).num_bytes, FrameShape(n, n, 0, quantize).num_bytes) <= 1
    )
    votes, num_bytes = _answer(f"sparse-sign:rho={rho}", given, layout)
    decided = int((votes != 0).sum())
    assert (
        0.8 < num_bytes / min(FrameShape(n, decided, 0, Sign()).num_bytes, FrameShape(n, n, 0, Trits()).num_bytes) <= 1
    )


@pytest.mark.parametrize("num_workers", [1, 4, 5])
def test_votes_are_the_sign_of_the_sum_of_signs_and_ties_are_zero(num_workers: int) -> None:
    n = 999
    layout, draw = Layout.of(["w"], [n]), torch.Generator().manual_seed(2)
    given = [torch.randn(n, generator=draw) for _ in range(num_workers)]
    votes, _ = _answer("sign", given, layout)
    assert torch.equal(votes, torch.stack([g.sign() for g in given]).sum(0).sign())
    sparse, _ = _answer("sparse-sign:rho=0.2", given, layout)
    tops = [torch.where(g.abs() >= g.abs().topk(200).values.min(), g.sign(), torch.zeros(n)) for g in given]
    assert torch.equal(sparse, torch.stack(tops).sum(0).sign())


@pytest.mark.parametrize("num_workers", [3, 4])
@pytest.mark.parametrize("text", ["sign", "sign:vote=weighted"])
def test_a_zero_votes_for_neither_side(text: str, num_workers: int) -> None:
    layout = Layout.of(["used", "idle"], [100, 100])
    given = torch.cat([torch.randn(100, generator=torch.Generator().manual_seed(1)), torch.zeros(100)])

    def work(transport: InProcess) -> Tensor:
        session, drift = Session(made(text), transport), torch.zeros(200)
        for _ in range(10):
            session.exchange_(Bucket(0, layout, flat := given.clone(), is_last=True))
            drift += flat
        return drift

    for drift in in_process(num_workers, work, num_servers=1):
        assert torch.equal(drift[:100], 10 * given[:100].sign()) and not drift[100:].any()


def test_a_record_fades_once_a_step_however_many_buckets_there_are() -> None:
    def records(sizes: list[int]) -> dict[str, list[float]]:
        owner = Owner(made("sign:vote=weighted"), 0, 1)
        layouts = [Layout.of([str(i)], [size]) for i, size in enumerate(sizes)]
        for step in range(3):
            for bucket, layout in enumerate(layouts):
                n = layout.num_entries
                codes, scale = Sign().encode(torch.ones(n))
                frame = FrameShape(n, 0, n, Sign()).write(
                    torch.empty(0, dtype=torch.int32), codes, scale, step=step, bucket=bucket
                )
                owner.answer(((rank, frame) for rank in range(3)), layout, step=step, bucket=bucket)
        kept: dict[str, list[float]] = owner.state_dict()["records"]
        return kept

    assert records([64]) == records([16, 16, 32]) != {}


def test_a_weighted_vote_uses_a_minority_that_lies() -> None:
    """Seven noisy workers, of whom three send the wrong sign: the majority is often wrong, the liars' record is not."""
    n, steps = 2000, 12
    layout = Layout.of(["w"], [n])
    truth = torch.randn(n, generator=torch.Generator().manual_seed(3)).sign()

    def right(text: str) -> float:
        def work(transport: InProcess) -> Tensor:
            session, draw = Session(made(text), transport), torch.Generator().manual_seed(100 + transport.rank)
            for _ in range(steps):
                flat = truth + 1.5 * torch.randn(n, generator=draw)
                flat = -flat if transport.rank < 3 else flat
                session.exchange_(Bucket(0, layout, flat, is_last=True))
            return flat

        return float((in_process(7, work)[0] == truth).float().mean())

    assert right("sign") < 0.75
    assert right("sign:vote=weighted") > 0.8


def test_a_weighted_vote_without_a_majority_is_a_plain_one() -> None:
    layout = Layout.of(["w"], [1000])

    def work(transport: InProcess) -> Tensor:
        session, draw = Session(made("sign:vote=weighted"), transport), torch.Generator().manual_seed(7)
        for _ in range(4):
            flat = torch.randn(1000, generator=draw)
            flat[:600] *= -1 if transport.rank else 1  # two workers that differ on more than half
            session.exchange_(Bucket(0, layout, flat, is_last=True))
        return flat

    alone, pair = (in_process(num_workers, work)[0] for num_workers in (1, 2))
    assert alone.all() and torch.equal(pair[600:], alone[600:])


@pytest.mark.parametrize("score", ["member", "hits", "product", "sum", "leader"])
def test_scores_make_unions_smaller_and_remember_alike(score: str) -> None:
    def work(session: Session, rank: int) -> tuple[float, dict[str, Tensor]]:
        for step in range(6):
            steady = gradients(0, 0)  # what all workers see at every step, each with noise of its own
            one_step(session, {name: steady[name] + noise for name, noise in gradients(rank, 100 + step).items()})
        union = session.stats(ages=True).union
        assert union is not None
        return union, session.state_dict()["past"].get("past", {})

    local = virtual.run(made("topk:rho=0.05,exchange=server"), 6, work)[0][0]
    results = virtual.run(made(f"overlap:rho=0.05,score={score},strength=0,down_rho=0"), 6, work)
    assert results[0][0] < 0.95 * local
    for _, past in results[1:]:
        assert all(torch.equal(past[name], results[0][1][name]) for name in past)


def test_exploring_reaches_every_entry_and_is_no_wider_than_its_share() -> None:
    """rho 20 %, of which half go round: every entry within 10 steps, however small it stays."""
    scheme = made("overlap:rho=0.2,explore=0.5")

    def work(session: Session, rank: int) -> list[tuple[float | None, int | None]]:
        told = []
        for step in range(12):
            given = {name: torch.ones_like(g) for name, g in gradients(rank, 0).items()}
            given["a"][:300] *= 1000
            one_step(session, given)
            if step in (1, 11):
                stats = session.stats(ages=True)
                told.append((stats.never_sent, stats.oldest_residual))
        return told

    (early, _), (never, oldest) = virtual.run(scheme, 2, work)[0]
    assert early is not None and early > 0.5 and never == 0
    assert oldest is not None and oldest <= 12


def test_down_rho_bounds_the_answer_and_what_waits_is_told_later() -> None:
    n = 10_000
    layout, draw = Layout.of(["w"], [n]), torch.Generator().manual_seed(5)
    given = [torch.randn(n, generator=draw) for _ in range(8)]

    def work(transport: InProcess) -> list[int]:
        session = Session(made("topk:rho=0.05,exchange=server(down_rho=0.1)"), transport)
        told = []
        for _ in range(3):
            flat = given[transport.rank].clone()
            session.exchange_(Bucket(0, layout, flat, is_last=True))
            told.append(int((flat != 0).sum()))
        assert 0 < session.stats().held_bytes <= 4 * n
        return told

    assert in_process(8, work)[0] == [1000] * 3


@pytest.mark.parametrize("text", ["overlap:rho=0.01", "topk:rho=0.01,quantize=none,exchange=server"])
def test_a_sum_beyond_float32_is_the_largest_there_is_and_passes(text: str) -> None:
    layout = Layout.of(["w"], [2000])

    def work(transport: InProcess) -> list[float]:
        session, out = Session(made(text), transport), []
        for large in (2e38, 1e-3, 1e-3, 1e-3, 1e-3):
            flat = torch.zeros(2000)
            flat[7] = large
            session.exchange_(Bucket(0, layout, flat, is_last=True))
            out.append(float(flat[7]))
        return out

    first, *_, last = in_process(2, work)[0]
    assert 1.6e38 < first < 2.1e38 and last == pytest.approx(1e-3, rel=0.01)


def test_what_is_held_of_a_parameter_waits_while_no_worker_uses_it() -> None:
    layout, scheme = Layout.of(["a", "b"], [2000, 2000]), made("overlap:rho=0.01,quantize=none,down_rho=0.01")

    def work(transport: InProcess) -> tuple[Tensor, Tensor]:
        session = Session(scheme, transport, holds_idle=True)
        draw, given, applied = torch.Generator().manual_seed(transport.rank), torch.zeros(2000), torch.zeros(2000)
        for step in range(200):
            flat = torch.randn(4000, generator=draw)
            flat[:2000] *= 0.01
            flat[2000:] *= step < 5
            given += flat[2000:]
            if step >= 20:  # and now it is used again, if only a little
                flat[2000] = 1e-30
            session.exchange_(Bucket(0, layout, flat, is_last=True))
            assert not (5 <= step < 20 and flat[2000:].any())
            applied += flat[2000:]
        return given, applied

    (first, applied), (second, same) = in_process(2, work, num_servers=1)
    assert torch.equal(applied, same)
    assert (applied - (first + second) / 2).norm() < 0.02 * applied.norm()


def test_buckets_of_nothing_are_answered() -> None:
    layout = Layout.of(["x", "y"], [0, 0])

    def work(transport: InProcess) -> int:
        session = Session(made("overlap:rho=0.05,per=parameter"), transport)
        session.exchange_(Bucket(0, layout, torch.empty(0), is_last=True))
        return session.stats().steps

    assert in_process(2, work) == [1, 1]


def test_a_cut_that_leaves_room_sends_no_more_than_without() -> None:
    """Room is not for what answers have rounded away, of which there is some at every entry that was ever said."""
    n, draw = 10_000, torch.Generator().manual_seed(6)
    layout, given = Layout.of(["w"], [n]), torch.randn(6, 2, n, generator=draw)

    def work(transport: InProcess, text: str) -> list[int]:
        session, told = Session(made(text), transport), []
        for step in range(6):
            flat = given[step, transport.rank].clone()
            session.exchange_(Bucket(0, layout, flat, is_last=True))
            told.append(int((flat != 0).sum()))
        return told

    cut, whole = (
        in_process(2, partial(work, text=text), num_servers=1)[0]
        for text in ("topk:rho=0.05,exchange=server(down_rho=0.5)", "topk:rho=0.05,exchange=server")
    )
    assert max(cut) <= 1000 and abs(sum(cut) - sum(whole)) < 10  # some sums cancel, and leave room


def test_overlap_cuts_at_three_times_rho_unless_told_otherwise() -> None:
    for text, share in {"overlap:rho=0.02": 0.06, "overlap:rho=0.5": 1.0, "overlap:down_rho=0": 0.0}.items():
        scheme = made(text)
        assert scheme.exchange == Server(down_rho=share) and scheme.holds
        assert made(str(scheme)) == made(str(replace(scheme))) == scheme
    assert (
        RECIPES["overlap"](down_rho=None) == made("overlap") and made("overlap:quantize=none,down_rho=0").holds is False
    )
    layout = Layout.of(["w"], [100_000])
    most = _bytes_down("overlap", layout, 256)
    assert most == _bytes_down("overlap", layout, 8) < _bytes_down("overlap:down_rho=0", layout, 8)


def _bytes_down(text: str, layout: Layout, num_workers: int) -> int:
    """What one server answers, foretold."""
    scheme = made(text)
    path = path_for(scheme, silent_end(num_workers, num_servers=1), PhaseClock(), Ledger(scheme.memory))
    assert isinstance(path, PushPull)
    return path.up_and_down(layout)[1]


def test_a_step_that_is_skipped_leaves_what_a_cut_holds_as_it_was() -> None:
    """Two runs, one of which meets Inf in between, are the same before and after, at workers and owners."""
    scheme = made(
        "overlap:rho=0.05,explore=0,down_rho=0.05"
    )  # whose turn it is goes by steps, of which one run has more

    def work(transport: InProcess, meets_inf: bool) -> tuple[dict[str, Tensor], Tensor]:
        session = Session(scheme, transport, loss_scale=lambda: 8.0)
        for step in range(4):
            given = {name: 8 * g for name, g in gradients(transport.rank, step).items()}
            if step == 3 and meets_inf:
                spoilt = {
                    name: torch.full_like(g, torch.inf) if transport.rank == 1 else g for name, g in given.items()
                }
                one_step(session, spoilt)
            out = one_step(session, given)
        return out, session.state_dict()["owner"]["held"]["a"]

    calm, shaken = (in_process(4, partial(work, meets_inf=inf)) for inf in (False, True))
    for (out, held), (other, other_held) in zip(calm, shaken, strict=True):
        assert torch.equal(held, other_held) and held.any()
        assert all(torch.equal(out[name], other[name]) for name in out)


def _sharded(text: str, way: type[TwoHops | Rounds]) -> tuple[list[dict[str, Tensor]], dict[str, Count]]:
    """Four steps over Gloo, consulting in this way; what one worker applied and counted."""
    cpu = torch.device("cpu")
    transport = Group(own_group(world(), cpu), cpu)
    transport._way = way(transport._group, cpu, transport.traffic)
    session = Session(made(text), transport)
    return [one_step(session, gradients(dist.get_rank(), step)) for step in range(4)], transport.traffic.copy()


@pytest.mark.parametrize("text", ["overlap:rho=0.05", "sparse-sign", "topk:rho=0.9,quantize=none,exchange=server"])
def test_two_hops_and_rounds_give_the_same_and_count_the_same(four_workers: WorkerPool, text: str) -> None:
    def work(transport: InProcess) -> tuple[list[dict[str, Tensor]], dict[str, Count]]:
        session = Session(made(text), transport)
        return [one_step(session, gradients(transport.rank, step)) for step in range(4)], transport.traffic.copy()

    ways = [four_workers.run(_sharded, text, TwoHops), four_workers.run(_sharded, text, Rounds), in_process(4, work)]
    for rank in range(4):
        (hops, counted), *others = (way[rank] for way in ways)
        for applied, count in others:
            assert count == counted
            for mine, theirs in zip(hops, applied, strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def _faulty(fault: Fault) -> str:
    """What a worker says when the second message of rank 2 goes wrong."""
    cpu = torch.device("cpu")
    faults = Faults({1: fault} if dist.get_rank() == 2 else {})
    transport = FaultyCollectives(Group(own_group(world(), cpu), cpu), faults)
    session = Session(made("topk:rho=0.05,exchange=server"), transport)
    with pytest.raises((FrameError, PeerError)) as error:
        one_step(session, gradients(dist.get_rank(), 0))
    return str(error.value)


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.TRUNCATE, Fault.DUPLICATE])
def test_who_hears_a_damaged_message_names_its_sender(four_workers: WorkerPool, fault: Fault) -> None:
    for said in four_workers.run(_faulty, fault):
        assert "from rank 2" in said and "\n" not in said


def _one_gives_up() -> str:
    """What a worker says when one of them fails before it answers."""
    cpu = torch.device("cpu")

    def answer(parts: Iterable[tuple[int, Tensor]]) -> Tensor:
        if dist.get_rank() == 2:
            raise FrameError("rank 2 fails")
        return torch.cat([part for _, part in parts])

    group = Group(own_group(world(), cpu), cpu)
    push = Push(Layout.of(["w"], [4]), 0, 0, [torch.ones(8, dtype=torch.uint8)] * 4, answer, [32] * 4)
    with pytest.raises((FrameError, PeerError)) as error:
        group.push_pull(push)
    return str(error.value)


def test_who_fails_says_so_to_those_who_wait_for_it(four_workers: WorkerPool) -> None:
    said = four_workers.run(_one_gives_up, timeout_s=60)
    assert said.pop(2) == "rank 2 fails"
    assert all("gave up" in other for other in said)


@pytest.mark.parametrize("text", ["none", "bf16", "sign", "levels(bits=5)"])
def test_no_frame_is_longer_than_the_longest(text: str) -> None:
    quantize = part("quantize", text)
    for n in (0, 1, 31, 64, 1000):
        forms = [FrameShape(n, k, n - k if k % 2 else 0, quantize).num_bytes for k in range(n + 1)]
        assert max(forms) <= longest_frame(n, [quantize])


def _as_worker(text: str, timeout_s: float = 60) -> Session:
    """This rank's session under rank 0, which serves."""
    hello = greeting(made(text), undoes=False, holds_idle=False)
    addresses = exchange_addresses([0], None)
    transport = ServerClient(dist.get_rank() - 1, dist.get_world_size() - 1, addresses, hello, timeout_s)
    return Session(made(text), transport)


def _steps_served(texts: list[str], steps: int) -> list[list[dict[str, Tensor]]]:
    outs: list[list[dict[str, Tensor]]] = []
    for text in (str(made(text)) for text in texts):
        if dist.get_rank() == 0:
            stats = serve(text, servers=[0])
            assert stats.steps == steps and not stats.lost
            outs.append([])
            continue
        session = _as_worker(text)
        outs.append([one_step(session, gradients(dist.get_rank() - 1, step)) for step in range(steps)])
        session.transport.close()
    return outs


def test_a_dedicated_server_gives_the_numbers_of_virtual_workers(fresh_workers: WorkerPool) -> None:
    texts = [
        "overlap:rho=0.05,warmup=1",
        "topk:rho=0.05,exchange=server(down_rho=0.1)",
        "overlap:score=leader",
        "sign:vote=weighted",
    ]
    served = fresh_workers.run(_steps_served, texts, 4)
    for number, text in enumerate(texts):

        def work(transport: InProcess, text: str = text) -> list[dict[str, Tensor]]:
            session = Session(made(text), transport)
            return [one_step(session, gradients(transport.rank, step)) for step in range(4)]

        want = in_process(3, work, num_servers=1)[0]
        for rank in (1, 2, 3):
            for step, got in enumerate(served[rank][number]):
                if "warmup" in text and step == 0:  # a dense step: floats, added in the same order here
                    continue
                assert all(torch.equal(got[name], want[step][name]) for name in got), (text, step)


def _until_one_dies(text: str) -> Any:
    text = str(made(text))
    if dist.get_rank() == 0:
        return serve(text, servers=[0]).as_dict()
    session, sums = _as_worker(text), []
    for step in range(6):
        if step == 3 and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        sums.append(
            one_step(
                session, {name: torch.full_like(g, float(dist.get_rank())) for name, g in gradients(0, step).items()}
            )
        )
    living = session.transport.num_living
    session.transport.close()
    return [float(out["f"][0]) for out in sums], living


def test_a_dedicated_server_goes_on_without_a_worker_that_was_killed(capfd: pytest.CaptureFixture[str]) -> None:
    pool = WorkerPool(4)
    try:
        for pipe in pool._pipes:
            pipe.send((_until_one_dies, ("topk:rho=0.05,exchange=server",)))
        told = []
        for pipe in pool._pipes[:3]:
            assert pipe.poll(120), "it hangs after a worker died"
            ok, value = pipe.recv()
            assert ok, value
            told.append(value)
    finally:
        pool.close()
    stats, first, second = told
    assert stats["lost"] == {2: "is gone after step 2"} and stats["steps"] == 6
    assert first == second == ([2.0, 2.0, 2.0, 1.5, 1.5, 1.5], 2)  # small parameters go whole: the mean over the living
    assert capfd.readouterr().err.count("laconic: worker 2 is gone after step 2; going on with 2 of 3") == 1


def _out_of_step(text: str) -> str:
    text = str(made(text))
    try:
        if dist.get_rank() == 0:
            serve(text, servers=[0])
            return "served"
        session = _as_worker(text)
        if dist.get_rank() == 2:
            session._step = 7
        one_step(session, gradients(0, 0))
    except FrameError as error:
        return str(error)
    return "nobody noticed"


def _server_that_ends(text: str) -> str:
    if dist.get_rank() == 0:
        from laconic.server.listener import Listener

        listener = Listener(dist.get_world_size() - 1, 60)
        exchange_addresses([0], listener)
        listener.accept()
        listener.hear(lambda rank, message: None)
        listener.close()
        return "server 0 is gone"
    session = _as_worker(str(made(text)))
    try:
        one_step(session, gradients(0, 0))
    except ServerLostError as error:
        return str(error)
    return "nobody noticed"


def test_a_frame_of_the_wrong_step_names_the_worker_and_a_dead_server_is_one_line(fresh_workers: WorkerPool) -> None:
    for said in fresh_workers.run(_out_of_step, "topk:rho=0.05,exchange=server"):
        assert "worker 1 sent layout of step 7, bucket 0, but the others sent layout of step 0" in said
    for said in fresh_workers.run(_server_that_ends, "topk:rho=0.05,exchange=server"):
        assert "server 0 is gone" in said and "\n" not in said


def test_an_owner_names_the_worker_whose_frame_is_damaged() -> None:
    layout = LAYOUTS[0]
    owner = Owner(made("topk:rho=0.05,quantize=none,exchange=server"), 0, 1)
    shape = FrameShape(layout.num_entries, 0, 10, made("topk:quantize=none").frame_code)
    frame = shape.write(torch.empty(0, dtype=torch.int32), torch.ones(10), torch.ones(()), step=0, bucket=0)
    for spoilt in (frame[:-4], torch.cat([frame[:50], frame[50:51] ^ 1, frame[51:]]), frame[:20]):
        with pytest.raises(FrameError, match="rank 5"):
            owner.answer([(0, frame), (5, spoilt)], layout, step=0, bucket=0)
    with pytest.raises(FrameError, match="rank 5"):
        owner.answer([(5, shape.write_overflow(frame.device, step=1, bucket=0))], layout, step=0, bucket=0)


def _ten_steps_or_five_and_five(text: str) -> bool:
    """Whether weights and states are the same after ten steps and after five, a checkpoint, and five more."""
    if dist.get_rank() == 0:
        for _ in range(2):
            serve(text, servers=[0])
        return True
    workers = dist.new_group([1, 2, 3], use_local_synchronization=True)
    ends: list[tuple[Tensor, Tensor]] = []
    saved: dict[str, Any] = {}
    for first in (0, 5):
        run = start(None, process_group=workers)
        session = attach(run.ddp, text, servers=[0])
        if first:
            run.ddp.module.load_state_dict(saved["model"])
            session.load_state_dict(saved["session"])
        for step in range(first, 10):
            if step == 5 and not first:
                saved = {"model": copy.deepcopy(run.ddp.module.state_dict()), "session": session.state_dict()}
            run.step(step)
        state = session.state_dict()
        if dist.get_rank() == 1:
            assert len(state["servers"]) == 1 and state["servers"][0].numel() > 4 * 1000
        ends.append((flat_parameters(run.ddp), state["memory"]["residual"]["body.weight"]))
        session.close()
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_checkpoint_under_a_dedicated_server_holds_what_the_server_keeps(fresh_workers: WorkerPool) -> None:
    assert all(fresh_workers.run(_ten_steps_or_five_and_five, "overlap:rho=0.05,per=parameter,down_rho=0.1"))


@pytest.mark.slow
def test_training_outlives_a_killed_worker_and_resumes_after_a_killed_server(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "laconic", "train", "--workers", "3", "--servers", "1", "--steps", "40"]
    words += ["--eval-every", "10", "--batch", "8", "--scheme", "overlap:rho=0.01", "--json"]
    whole = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    code, said, result = _train_and_kill(words, tmp_path / "worker", rank=1)
    assert code == 0 and said.count("worker 0 is gone after step") == 1
    assert result["steps"] == 40 and list(result["lost_workers"]) == ["0"]
    code, said, _ = _train_and_kill(words, tmp_path / "server", rank=0)
    assert code == 2 and said.count("server 0 is gone") == 3 and "Traceback" not in said
    resumed = subprocess.run([*words, "--out", str(tmp_path / "server"), "--resume"], capture_output=True, check=True)
    assert json.loads(resumed.stdout)["loss"] == whole["loss"]


def _train_and_kill(words: list[str], out: Path, rank: int) -> tuple[int, str, dict[str, Any]]:
    """Kill one rank with signal 9 after step 13: (exit code, what was said, the result)."""
    run = subprocess.Popen([*words, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while run.poll() is None and not (
        (out / RECORDS).exists() and any(fact["step"] >= 13 for fact in read(out, "step"))
    ):
        time.sleep(0.05)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    mark = f"RANK={rank}".encode()
    (victim,) = [int(pid) for pid in children if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(victim, signal.SIGKILL)
    told, said = run.communicate(timeout=300)
    return run.returncode, said, json.loads(told) if told else {}
