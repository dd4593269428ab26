"""The server exchange: shares, answers, votes, unions; dedicated servers over real processes, and deaths."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laconic import FrameError, Session
from laconic.exchange import Server, Shares
from laconic.exchange import shares as shares_module
from laconic.layout import Bucket, Layout
from laconic.paths import PhaseClock, path_for
from laconic.paths.push_pull import PushPull
from laconic.quantize import Sign, Trits
from laconic.recipes import RECIPES
from laconic.scheme import part
from laconic.server.owner import Owner
from laconic.transport import (
    InProcess,
    in_process,
    silent_end,
)
from laconic.wire import FrameShape, longest_frame
from laconic_lab.records import read
from laconic_lab.train import Job, verdict, work_in_process
from laconic_lab.train.result import Result
from tests import virtual
from tests.parts import made
from tests.virtual import LAYOUTS, gradients, one_step


@pytest.mark.parametrize("long_run", [0, 500])  # places are joined by runs, or by entry
@pytest.mark.parametrize("num_shares", [1, 2, 3, 8, 64])
def test_shares_are_pieces_of_every_parameter_and_lead_back(
    num_shares: int, long_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares_module, "_LONG_RUN", long_run)
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
    assert all(bool((at[1:] > at[:-1]).all()) for at in places)
    values = torch.randn(positions.numel(), generator=torch.Generator().manual_seed(1))
    by_share = torch.split(values[order], [at.numel() for at in places])
    back, told = shares.joined(places, by_share)
    assert torch.equal(back, positions) and torch.equal(told, values)
    whole = [torch.arange(own.num_entries) for own in shares.layouts]
    everything, _ = shares.joined(whole, [at.to(torch.float32) for at in whole])
    assert torch.equal(everything, torch.arange(layout.num_entries))


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
    assert honest.loss < lying.loss and honest.figures["server_bytes_out"] == 3 * honest.bytes_in


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
                owner.answer(dict.fromkeys(range(3), frame), layout, step=step, bucket=bucket)
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


@pytest.mark.parametrize("score", ["member", "hits", "product", "sum"])
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
    scheme = made("overlap:rho=0.2,score=product,explore=0.5")

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
def test_a_sum_beyond_float32_is_the_largest_there_is_and_passes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of workers that do not look at their gradients, as these would refuse them."""
    monkeypatch.setattr(sys.modules["laconic.session.session"], "TOO_LARGE", math.inf)
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


@pytest.mark.parametrize(
    "text", ["overlap:rho=0.05,per=parameter", "maxnorm:bits=4", "multiscale:bits=4,stages=2", "randk-maxnorm:rho=0.5"]
)
def test_buckets_of_nothing_are_answered(text: str) -> None:
    layout = Layout.of(["x", "y"], [0, 0])

    def work(transport: InProcess) -> int:
        session = Session(made(text), transport)
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
    path = path_for(scheme, silent_end(num_workers, num_servers=1), PhaseClock(), scheme.memory.ledger())
    assert isinstance(path, PushPull)
    return path.up_and_down(layout)[1]


def test_a_step_that_is_skipped_leaves_what_a_cut_holds_as_it_was() -> None:
    """Two runs, one of which meets Inf in between, are the same before and after, at workers and owners."""
    scheme = made(
        "overlap:rho=0.05,score=product,explore=0,down_rho=0.05"
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


@pytest.mark.parametrize("text", ["none", "bf16", "sign", "levels(bits=5)", "lloyd"])
def test_no_frame_is_longer_than_the_longest(text: str) -> None:
    quantize = part("quantize", text)
    for n in (0, 1, 31, 64, 1000):
        forms = [FrameShape(n, k, n - k if k % 2 else 0, quantize).num_bytes for k in range(n + 1)]
        assert max(forms) <= longest_frame(n, [quantize])


@pytest.mark.parametrize("text", ["topk:rho=0.05,quantize=none,exchange=server", "sparse-sign:rho=0.05"])
def test_an_answer_with_other_fixed_entries_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(["few", "w"], [20, 4000])
    num_fixed = 0

    def answer(owner: Owner, frames: Iterable[tuple[int, Tensor]], layout: Layout, **which: int) -> Tensor:
        list(frames)
        quantize = owner.scheme.frame_code
        shape = FrameShape(layout.num_entries, 5, num_fixed, quantize)
        codes, scale = quantize.encode(torch.ones(num_fixed + 5))
        return shape.write(torch.arange(30, 35, dtype=torch.int32), codes, scale, **which)

    monkeypatch.setattr(Owner, "answer", answer)
    expected = 0 if "sign" in text else 20
    for num_fixed in (0, 19, 20, 21):  # read by `answer`
        given = [torch.randn(layout.num_entries) for _ in range(2)]
        if num_fixed == expected:
            _answer(text, given, layout)
            continue
        with pytest.raises(FrameError, match=f"owner 0 sent {num_fixed} fixed entries, not {expected}"):
            _answer(text, given, layout)


def test_an_owner_names_the_worker_whose_frame_is_damaged() -> None:
    layout = LAYOUTS[0]
    owner = Owner(made("topk:rho=0.05,quantize=none,exchange=server"), 0, 1)
    shape = FrameShape(layout.num_entries, 0, 10, made("topk:quantize=none").frame_code)
    frame = shape.write(torch.empty(0, dtype=torch.int32), torch.ones(10), torch.ones(()), step=0, bucket=0)
    for spoilt in (frame[:-4], torch.cat([frame[:50], frame[50:51] ^ 1, frame[51:]]), frame[:20]):
        with pytest.raises(FrameError, match="rank 5"):
            owner.answer({0: frame, 5: spoilt}, layout, step=0, bucket=0)
    with pytest.raises(FrameError, match="rank 5"):
        owner.answer({5: shape.write_overflow(frame.device, step=1, bucket=0)}, layout, step=0, bucket=0)
