"""Under masks a server reads sums of drifts that are exact, and of a single member nothing."""

from __future__ import annotations

import logging
import math
import multiprocessing
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import laconic
from laconic import PeerError, SchemeError, StateError, parse
from laconic.errors import FrameError
from laconic.members import prometheus_text, replay
from laconic.members.masks import Masks, SumGrid, masked_codes
from laconic.members.messages import (
    Anchor,
    Bequest,
    Codes,
    Drift,
    Leave,
    Request,
    Roster,
    write,
)
from laconic.members.syncer import Syncer
from laconic.members.tape import records
from tests.members.test_members import SCHEME, Trainee, train_for_ever
from tests.members.virtual import VirtualMember, VirtualRun
from tests.workers import wait_until

SCHEMES = ("local:every=2", "streaming:every=4,fragments=2,delay=1")


class NoMasks(Masks):
    """The integer codes as they are."""

    def add_(self, words: Any, others: Iterable[str], context: bytes) -> None: ...


def _run(scheme: str, num_members: int = 3, seed: int = 0, **options: Any) -> tuple[VirtualRun, list[VirtualMember]]:
    run = VirtualRun(scheme, **{"mask_bits": 16, **options})
    for number in range(num_members):
        run.members.append(VirtualMember(run, f"m{number}", number))
        run.members[-1].connect()
        run.settle()
    return run, run.members


def _train(run: VirtualRun, rounds: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    while run.syncer.rounds < rounds:
        for member in run.members:
            member.train(rng)
        run.settle()


def _codes_of(member: VirtualMember) -> list[Codes]:
    return [word for process, word in member.run.seen if process == member.process and isinstance(word, Codes)]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_sum_is_that_of_the_codes_and_no_longer(scheme: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and byte for byte."""
    runs = []
    for masks in (Masks, NoMasks):
        draws = random.Random(5)
        monkeypatch.setattr("secrets.randbits", draws.getrandbits)
        run, _ = _run(scheme, masks=masks, mask_bits=bits, is_lockstep=True)
        _train(run, 12)
        runs.append(run)
    masked, plain = runs
    assert masked.anchors.keys() == plain.anchors.keys() and len(masked.anchors) > 12
    assert all(torch.equal(anchor, plain.anchors[key]) for key, anchor in masked.anchors.items())
    sizes = [[write(word).payload.numel() for _, word in run.seen] for run in runs]
    assert sizes[0] == sizes[1]
    pairs = [(a, b) for (_, a), (_, b) in zip(masked.seen, plain.seen, strict=True) if isinstance(a, Codes)]
    assert pairs
    assert not any(torch.equal(a.payload, b.payload) for a, b in pairs if isinstance(b, Codes))


def _chi_square(counts: np.ndarray[Any, Any]) -> float:
    """How many standard deviations the statistic is from its mean, where all values are as likely."""
    num_values = float(counts.size)
    expected = counts.sum() / num_values
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (num_values - 1)) / math.sqrt(2 * (num_values - 1))


@pytest.mark.parametrize("bits", [8, 16])
def test_what_a_member_sends_looks_uniform(bits: int) -> None:
    keys = [Masks(bits, bytes([number]) * 32) for number in range(3)]
    roster = Roster(0, 4, 0, 300, {f"m{i}/0": i for i in range(3)}, SumGrid.at(bits, torch.ones(1 << 17)).exponents)
    grid = SumGrid.read(bits, roster.payload.view(torch.uint8), 1 << 17)
    drift = torch.linspace(-1, 1, 1 << 17).square()  # nothing like uniform
    unmasked = grid.encode(drift, 1 / 3, 3)[0][: 1 << 17]
    payload, _ = masked_codes(grid, keys[0], drift, 100, roster, [masks.public for masks in keys])
    payload = payload[: unmasked.nbytes]  # without the ones behind them
    for text, least, most in ((unmasked.view(np.uint8), 20.0, np.inf), (payload.numpy(), -4.0, 4.0)):
        for values in (text, text[0::2], text[1::2], text[1:] ^ text[:-1]):
            assert least < _chi_square(np.bincount(values, minlength=256)) < most
    each_bit = np.unpackbits(payload.numpy()).reshape(-1, 8).mean(0)
    assert np.abs(each_bit - 0.5).max() < 4 * 0.5 / (1 << 17) ** 0.5  # four standard deviations
    correlation = np.corrcoef(payload.numpy().view(unmasked.dtype).astype(float), drift.numpy())[0, 1]
    assert abs(correlation) < 4 / (1 << 17) ** 0.5


def _floats_in(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _floats_in(inner)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_message_of_a_member_has_a_drift_in_clear(scheme: str) -> None:
    """From the first one to the last; the model that begins a run, which the server keeps, is its first anchor."""
    run, members = _run(scheme)
    _train(run, 8)
    leaver = members[0]
    leaver.send(leaver.replica.leave())
    while not leaver.replica.has_left:
        for other in members[1:]:
            other.train(random.Random(run.syncer.rounds))
        run.settle()
    kinds = {type(word) for _, word in run.seen}
    assert kinds == {Anchor, Codes, Drift, Leave, Request}  # and Join, which connect() sends
    for process, word in run.seen:
        if isinstance(word, Anchor):
            assert process == "m0/0" and word.version == 0
        elif isinstance(word, Codes):
            assert word.payload.numel() == 2 * leaver.replica.pieces[word.fragment].part.num_entries + 8
        else:
            assert getattr(word, "payload", torch.empty(0)).numel() == 0
            assert not any(_floats_in(vars(word))), "no norm either"


def test_a_death_voids_a_round_which_is_repeated_without_it() -> None:
    run, members = _run("local:every=1")
    rng = random.Random(0)
    for member in members:
        member.train(rng)
    while any(member.up for member in members):
        for member in members:
            member.pass_up()
    rosters = [[word for word in member.down if isinstance(word, Roster)] for member in members]
    assert all(len(roster.numbers) == 3 for (roster, *_) in rosters)
    before = [piece.anchor.clone() for piece in members[0].replica.pieces.values()]
    for member in members[:2]:  # their codes for it come
        while member.down:
            member.pass_down()
        while member.up:
            member.pass_up()
    assert run.syncer.rounds == 0
    members[2].cut()
    assert all(set(word.numbers) == {"m0/0", "m1/1"} for word in members[0].down if isinstance(word, Roster))
    run.settle()
    assert run.syncer.rounds == len(before) and [len(_codes_of(member)) for member in members] == [4, 4, 0]
    for number, piece in members[0].replica.pieces.items():
        assert piece.version == 1 and not members[2].counted[number].any()
    for member in members:
        run.check_books(member)
    members[2].connect()
    run.settle()
    _train(run, run.syncer.rounds + 4)
    assert len(_codes_of(members[2])) > 0, "what it had not sent is in the next sum"
    run.check_books(members[2])


def test_codes_that_come_after_a_member_was_given_up_are_not_read() -> None:
    run, members = _run("local:every=1", wait_budget_s=3.0)
    for member in members:
        member.train(random.Random(0))
    while any(member.up for member in members):
        for member in members:
            member.pass_up()
    late = members[2]
    for member in members:
        while member.down:
            member.pass_down()
        while member.up and member is not late:
            member.pass_up()
    codes = [word for word in late.up if isinstance(word, Codes)]
    connection = late.connection
    run.now += 4
    run.deliver(run.syncer.on_time(run.now))
    assert codes and late.connection is None, "the server has ended its connection first"
    with pytest.raises(FrameError, match="before it joined"):
        run.syncer.on_word(connection or 0, codes[0], run.now)
    run.settle()
    assert run.syncer.rounds > 0 and not _codes_of(late)
    run.check_books(late)


def test_who_returns_while_its_codes_are_in_a_sum_is_told_when_that_is_whole() -> None:
    run, members = _run("local:every=1")
    for member in members:
        member.train(random.Random(0))
    while any(member.up for member in members):
        for member in members:
            member.pass_up()
    back = members[0]
    while back.down or back.up:
        back.pass_down()
        back.pass_up()
    back.cut()
    back.connect()
    while back.down or back.up:
        back.pass_down()
        back.pass_up()
    assert all(piece.is_asking for piece in back.replica.pieces.values())
    run.settle()
    assert all(piece.counted >= 0 and piece.version == 1 for piece in back.replica.pieces.values())
    run.check_books(back)


def test_a_drift_that_is_not_finite_is_sent_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    _, members = _run("local:every=1")
    with torch.no_grad():
        next(members[0].model.parameters()).view(-1)[0] = float("nan")
    with caplog.at_level(logging.WARNING, "laconic.members"):
        words = members[0].replica.after_step()
    assert "not finite" in caplog.text
    assert [word.fragment for word in words if isinstance(word, Drift)] == [1], "the buffers alone"


def _mean(grid: SumGrid, words: Any, num_members: int) -> torch.Tensor:
    mean = grid.mean(words, num_members, torch.device("cpu"))
    assert mean is not None
    return mean


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("num_members", [2, 9, 60])
def test_no_sum_wraps_whatever_members_send(bits: int, num_members: int) -> None:
    draw = torch.Generator().manual_seed(num_members)
    tokens = [int(t) for t in torch.randint(1, 1000, (num_members,), generator=draw)]
    grid = SumGrid.at(bits, torch.ones(2000))
    for values in (torch.full((2000,), 1e9), torch.full((2000,), -1e9), torch.randn(2000, generator=draw)):
        total, mean = grid.zeros(), torch.zeros(2000, dtype=torch.float64)
        for count in tokens:
            codes, moved = grid.encode(values, count / sum(tokens), num_members)
            total += codes
            mean += moved.double() * count / sum(tokens)
        assert torch.allclose(_mean(grid, total, num_members).double(), mean, rtol=1e-5, atol=1e-9)


def test_the_grid_follows_the_drifts() -> None:
    grid = SumGrid.at(8, torch.zeros(1024))
    drift = torch.cat([torch.full((512,), 1e-3), torch.full((512,), 3e-4)])
    for scale in (1.0, 1e4, 1e-5):
        residual = torch.zeros(1024)
        for _ in range(12):
            owed = scale * drift + residual
            codes, moved = grid.encode(owed, 0.5, 2)
            residual = owed - moved
            grid = grid.after(_mean(grid, codes, 1) * 2)
        assert float(residual.norm()) < 0.1 * float((scale * drift).norm())


def test_what_masks_cannot_hide_is_refused_in_one_line() -> None:
    for combine in ("clipped", "median", "trimmed+near"):
        with pytest.raises(SchemeError, match=r"compares single drifts, which masks hide; use mean"):
            Syncer(parse("streaming"), combine=combine, mask_bits=8)  # type: ignore[arg-type]
    with pytest.raises(SchemeError, match="which entries it sends, in clear; under masks use one like streaming"):
        Syncer(parse("sparseloco"), mask_bits=8)  # type: ignore[arg-type]
    with pytest.raises(SchemeError, match="masks of 12 bits do not exist; use 8 or 16"):
        Syncer(parse("streaming"), mask_bits=12)  # type: ignore[arg-type]


@pytest.mark.parametrize("numbers", [{"m0/0": 7}, {"m0/0": 7, "m1/1": 8}])
def test_a_member_masks_no_sum_that_would_show_its_drift(numbers: dict[str, int]) -> None:
    """Of its own drift alone, or with another one whose key is its own."""
    masks = Masks(8, bytes(32))
    grid = SumGrid.at(8, torch.ones(64))
    roster = Roster(0, 0, 0, 30, numbers, grid.exponents.view(torch.uint8))
    with pytest.raises(FrameError, match="would show a single drift"):
        masked_codes(grid, masks, torch.ones(64), 10, roster, [masks.public] * len(numbers))


def _masks(number: int) -> Masks:
    return Masks(16, bytes([number]) * 32)


def _words(masks: Masks, roster: Roster, keys: list[str], values: torch.Tensor) -> Any:
    grid = SumGrid.read(16, roster.payload, values.numel())
    return masked_codes(grid, masks, values, 10, roster, keys)[0].numpy().view(np.uint16)


_ROSTER = Roster(0, 0, 0, 30, {"m0/0": 7, "m1/1": 8}, SumGrid.at(16, torch.ones(4096)).exponents.view(torch.uint8))


@pytest.mark.parametrize(
    "other",
    [
        replace(_ROSTER, fragment=1),
        replace(_ROSTER, version=1),
        replace(_ROSTER, attempt=1),
        replace(_ROSTER, tokens=31),
        replace(_ROSTER, numbers={"m0/0": 9, "m1/1": 8}),
        replace(_ROSTER, payload=_ROSTER.payload + 1),
    ],
    ids=["fragment", "version", "attempt", "tokens", "numbers", "payload"],
)
def test_no_two_sums_share_masks(other: Roster) -> None:
    """Or their difference would be that of two drifts."""
    keys = [_masks(1).public, _masks(2).public]
    zeros = torch.zeros(4096)
    first, second = (_words(_masks(1), roster, keys, zeros) for roster in (_ROSTER, other))
    assert np.array_equal(first, _words(_masks(1), _ROSTER, keys, zeros))
    assert (first == second).mean() < 0.01


def test_one_roster_under_several_key_maps_shows_no_bit() -> None:
    """A server that lies about keys asks thrice, and each stream is in two answers."""
    own, *others = [_masks(number).public for number in (1, 2, 3, 4)]
    roster = replace(_ROSTER, numbers={"m0/0": 7, "m1/1": 8, "m2/2": 9})
    values = 0.1 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    total = sum(_words(_masks(1), roster, [own, *pair], values) for pair in combinations(others, 2))
    codes = SumGrid.read(16, roster.payload, 4096).encode(values, 1 / 3, 3)[0]
    assert 0.45 < float((total % 2 == codes % 2).mean()) < 0.55


def test_two_spellings_of_one_key_do_not_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_MASK_SECRET", "which the server does not know")
    own = _masks(1)
    roster = replace(_ROSTER, numbers={"m0/0": 7, "m1/1": 8, "m2/2": 9})
    values = torch.ones(4096)
    for byte in range(128):
        raw = bytes.fromhex(_masks(2).public)[:31]
        low, high = (raw + bytes([byte | top]) for top in (0, 0x80))  # X25519 ignores the topmost bit
        if low.hex() < own.public < high.hex():
            break
    codes = SumGrid.read(16, roster.payload, 4096).encode(values, 1 / 3, 3)[0]
    assert (_words(own, roster, [own.public, low.hex(), high.hex()], values) == codes).mean() < 0.01
    for key in (" " + _masks(2).public, _masks(2).public.upper(), ""):
        with pytest.raises(FrameError, match="no public key"):
            _words(own, roster, [own.public, _masks(3).public, key], values)


def test_who_joins_with_the_key_of_another_is_refused() -> None:
    run, members = _run("local:every=1", num_members=2)
    members.append(VirtualMember(run, "m2", 2))
    members[2].replica.masks = members[0].replica.masks
    with pytest.raises(FrameError, match="key is another member's"):
        members[2].connect()


def test_a_server_that_asks_for_the_model_amid_a_run_does_not_get_it() -> None:
    run, members = _run("local:every=1")
    _train(run, 2)
    replica = members[1].replica
    with pytest.raises(PeerError, match="which would show its drift"):
        replica.on_word(replace(run.syncer.status(), founder=replica.generation, is_founded=False))


@pytest.mark.parametrize("wait_budget_s", [0.0, 1.0])
def test_steps_longer_than_the_wait_budget_end_no_run(wait_budget_s: float) -> None:
    """Codes come with the step after that in which a drift was announced."""
    run, members = _run("local:every=1", wait_budget_s=wait_budget_s)
    rng = random.Random(0)
    for _ in range(20):
        for member in members:
            if member.connection is None:
                member.connect()
            while member.down:
                member.pass_down()
            member.train(rng)
            while member.up:
                member.pass_up()
        for _ in range(8):
            run.now += 0.2
            run.deliver(run.syncer.on_time(run.now))
    assert run.syncer.rounds > 4
    for member in members:
        run.check_books(member)


def test_codes_that_do_not_cancel_make_no_outer_step(caplog: pytest.LogCaptureFixture) -> None:
    run, members = _run("diloco:every=1")
    _train(run, 6)
    before = run.syncer.fragments[0].anchor.clone()
    send = members[1].send

    def lie(words: list[Any]) -> None:
        noise = torch.Generator().manual_seed(0)
        send(
            [
                replace(word, payload=torch.randint(256, word.payload.shape, generator=noise, dtype=torch.uint8))
                if isinstance(word, Codes)
                else word
                for word in words
            ]
        )

    members[1].send = lie  # type: ignore[method-assign]
    _train(run, run.syncer.rounds + 6)
    assert "its masks do not cancel" in caplog.text
    assert torch.allclose(run.syncer.fragments[0].anchor, before, atol=0.02), "but for what rounding had kept"


def test_a_drift_in_clear_is_not_taken() -> None:
    run, members = _run("local:every=1")
    values = torch.ones(members[0].replica.pieces[0].part.num_entries).view(torch.uint8)
    with pytest.raises(FrameError, match="in clear"):
        run.syncer.on_drift("m0", Drift(0, 0, 1, 1, 1, 0.0, {}, values), 0.0)
    with pytest.raises(FrameError, match="handed over something"):
        run.syncer.on_bequest("m0", Bequest(0, 1, values))
    members[0].replica.masks = None
    with pytest.raises(FrameError, match="masked where this run's are not, or the reverse"):
        members[0].connect()


def test_a_sum_whose_masks_do_not_cancel_moves_no_anchor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stranger(Masks):
        def add_(self, words: Any, others: Iterable[str], context: bytes) -> None:
            monkeypatch.setenv("LACONIC_MASK_SECRET", self.public)  # each has its own
            super().add_(words, others, context)

    run, members = _run("local:every=1", masks=Stranger)
    before = {number: fragment.anchor.clone() for number, fragment in run.syncer.fragments.items()}
    _train(run, 3)
    assert "give all members the same LACONIC_MASK_SECRET" in caplog.text
    assert all(torch.equal(fragment.anchor, before[n]) for n, fragment in run.syncer.fragments.items())
    for member in members:
        run.check_books(member)


def test_another_secret_of_the_members_gives_other_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Masks(8, b"1" * 32), Masks(8, b"2" * 32)
    total = np.zeros(4096, np.uint8)
    first.add_(total, [second.public], b"sum")
    assert total.any()
    other = total.copy()
    second.add_(total, [first.public], b"sum")
    assert not total.any(), "they cancel"
    monkeypatch.setenv("LACONIC_MASK_SECRET", "which the server does not know")
    second.add_(other, [first.public], b"sum")
    assert other.any()


def test_without_cryptography_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SchemeError, match=r"pip install 'laconic\[masks\]'"):
        Masks(8, bytes(32))


def _together(trainees: list[Trainee], work: Callable[[Trainee], object]) -> None:
    with ThreadPoolExecutor(len(trainees)) as threads:
        for done in [threads.submit(work, trainee) for trainee in trainees]:
            done.result(timeout=60)


def test_members_learn_and_leave_under_masks_and_a_tape_replays_it(tmp_path: Path) -> None:
    losses: dict[str, float] = {}

    def work(trainee: Trainee) -> None:
        losses[trainee.member.id] = trainee.train(150)
        trainee.member.leave()

    with laconic.MemberServer(SCHEME, "127.0.0.1:0", mask_bits=8, tape=tmp_path / "tape") as server:
        trainees = [Trainee(server.address, f"m{i}", is_masked=True) for i in range(3)]
        _together(trainees, work)
        stats = server.stats()
    assert len(losses) == 3 and max(losses.values()) < 0.2
    assert stats["num_members"] == 0 and stats["rounds"] > 10 and stats["mask_bits"] == 8
    assert "residual_norm" not in prometheus_text(stats).replace("# TYPE laconic_member_residual_norm gauge", "")
    again = replay(tmp_path / "tape")
    assert all(torch.equal(again.fragments[n].anchor, f.anchor) for n, f in server.syncer.fragments.items())
    assert (tmp_path / "tape").read_bytes().count(b'["Codes"') > 20


def test_a_server_that_restarts_continues_masked_sums(tmp_path: Path) -> None:
    with laconic.MemberServer(SCHEME, "127.0.0.1:0", mask_bits=16, state=tmp_path) as server:
        trainees = [Trainee(server.address, f"m{i}") for i in range(2)]
        _together(trainees, lambda trainee: trainee.train_until(4))
        before = server.stats()["rounds"]
    for other in (0, 8):
        with pytest.raises(StateError, match="mask_bits=16; serve it with that"):
            laconic.MemberServer(SCHEME, "127.0.0.1:0", mask_bits=other, state=tmp_path)
    with laconic.MemberServer(SCHEME, server.address, mask_bits=16, state=tmp_path) as server:
        _together(trainees, lambda trainee: trainee.train_until(before + 4))
        for trainee in trainees:
            trainee.member.close()


def test_the_others_go_on_without_one_that_is_killed_under_masks() -> None:
    fork = multiprocessing.get_context("fork")  # before the server has threads
    own, theirs = fork.Pipe()
    killed = fork.Process(target=train_for_ever, args=(theirs, "killed"))
    killed.start()
    try:
        with laconic.MemberServer(SCHEME, "127.0.0.1:0", mask_bits=16, wait_budget_s=2.0) as server:
            own.send(server.address)
            assert own.recv() == "in"
            trainees = [Trainee(server.address, f"m{i}") for i in range(2)]
            _together(trainees, lambda trainee: trainee.train_until(6))
            killed.kill()
            _together(trainees, lambda trainee: trainee.train_until(trainee.member.progress[1] + 8))
            for trainee in trainees:
                trainee.member.close()
    finally:
        killed.kill()
        killed.join()


def test_who_was_cut_off_answers_no_roster_of_before(tmp_path: Path) -> None:
    """It is void, and the server has the sum of the others' drifts: with these codes it would have this one."""
    with laconic.MemberServer(SCHEME, "127.0.0.1:0", mask_bits=16, wait_budget_s=0.5, tape=tmp_path / "tape") as server:
        late, *others = [Trainee(server.address, f"m{i}") for i in range(3)]
        late.train(4)  # it has announced a drift, and answers nothing
        _together(others, lambda trainee: trainee.train_until(4))
        assert wait_until(lambda: late.member.stats().reconnects >= 1)
        assert wait_until(lambda: server.stats()["num_members"] == 3)
        late.train(1)
        for trainee in (late, *others):
            trainee.member.close()
    has_asked: dict[int, bool] = {}
    for _, connection, text in records(tmp_path / "tape"):
        kind = re.match(rb'.{4}\["(\w+)"', text, re.S)
        if connection and kind:
            assert kind[1] != b"Codes" or has_asked.get(connection), "what the server has asked this connection for"
            has_asked[connection] = has_asked.get(connection, False) or kind[1] == b"Request"
    assert len(has_asked) >= 4


def test_who_wants_masks_joins_no_server_that_sees_drifts() -> None:
    with (
        laconic.MemberServer(SCHEME, "127.0.0.1:0") as server,
        pytest.raises(PeerError, match="would see this member's drifts; serve it with --mask-bits 16"),
    ):
        Trainee(server.address, "m", is_masked=True)


def test_who_is_alone_leaves_at_once_and_states_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    with laconic.MemberServer(SCHEME, "127.0.0.1:0", mask_bits=16) as server:
        trainee = Trainee(server.address, "m")
        trainee.train(10)
        trainee.member.leave()
        assert server.stats()["rounds"] == 0
    assert "that no sum took end here" in caplog.text


def test_who_leaves_in_lockstep_does_not_wait_for_what_is_not_due() -> None:
    scheme = "streaming:every=4,fragments=1,delay=4"
    with laconic.MemberServer(scheme, "127.0.0.1:0", mask_bits=16, is_lockstep=True) as server:
        trainees = [Trainee(server.address, f"m{i}") for i in range(2)]
        _together(trainees, lambda trainee: trainee.train(4))  # and announces
        for _ in range(3):  # in which it sends codes, and gets a result that is not due
            wait_until(lambda: server.stats()["rounds"] == 1, timeout_s=0.5)
            _together(trainees, lambda trainee: trainee.train(1))
        _together(trainees, lambda trainee: trainee.member.leave(20))
        assert server.stats()["num_members"] == 0
