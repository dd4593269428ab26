"""Chaos itself: seeds draw everything there is, promises are looked at, and one that is broken names its seed."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from laconic.cli import main
from laconic.layout import Bucket, Layout
from laconic_lab.chaos import members, processes, soak, virtual
from laconic_lab.chaos.mass import Tally, imbalance
from laconic_lab.chaos.schedule import (
    FAMILIES,
    LINK_FAULTS,
    MEMBER_FAULTS,
    MEMBER_PHASES,
    MEMBER_SCHEME,
    MESSAGE_FAULTS,
    PHASES,
    PHASES_BETWEEN,
    PROCESS_FAULTS,
    TRUST_FAULTS,
    Case,
    draw,
)

ROOT = Path(__file__).parents[3]
DRIFT = "scheme:exchange=server,trigger=rounds(every=2),outer=nesterov"


def test_a_seed_draws_the_same_fault_again_and_seeds_draw_all_of_them() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    drawn = [draw(seed) for seed in range(3000)]
    assert {(case.family, case.on) for case in drawn} == set(itertools.product(FAMILIES, ("virtual", "processes")))
    assert {case.scheme for case in drawn} == {scheme for schemes in FAMILIES.values() for scheme in schemes}
    assert {case.fault for case in drawn} == {*MESSAGE_FAULTS, "die", *PROCESS_FAULTS}
    assert {case.phase for case in drawn if case.fault == "kill"} == set(PHASES)
    in_lab = {draw(seed, hosts=3).fault for seed in range(300)}
    assert in_lab == {*PROCESS_FAULTS, *LINK_FAULTS}


def test_virtual_faults_break_no_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--seed", "3", "--faults", "12", "--on", "virtual", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["faults"], found["violations"], found["on_processes"]) == (12, [], 0)
    assert 0 < found["struck"] <= 12 and found["seconds"] > 0 and sum(found["families"].values()) == 12


def test_a_broken_promise_names_the_seed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "_undisturbed", lambda family, scheme: torch.zeros(1))
    seed = next(seed for seed in range(100) if draw(seed, "virtual", "dense").fault == "delay")
    arguments = ["--seed", str(seed), "--faults", "1", "--on", "virtual", "--scheme", "dense"]
    assert main(["chaos", *arguments, "--json"]) == 1
    said = capsys.readouterr()
    (violation,) = json.loads(said.out.splitlines()[-1])["violations"]
    assert violation["seed"] == seed and f"seed {seed} breaks a promise" in said.err
    assert main(["chaos", "--faults", "0"]) == 2 and "give 1 or more" in capsys.readouterr().err
    assert main(["chaos", "--scheme", "silent"]) == 2 and "says nothing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("fault", PROCESS_FAULTS)
def test_faults_of_real_processes_break_no_promise(fault: str) -> None:
    phase = "checkpoint" if fault in ("full disk", "restart") else "connect" if fault in TRUST_FAULTS else "talk"
    outcome = processes.check(Case(0, "processes", "all-gather", "topk:rho=0.05", fault, phase, 1, 3))
    assert outcome.struck and not outcome.broken


def test_seeds_walk_every_fault_of_members_at_every_phase() -> None:
    drawn = [draw(seed, "members", hosts=5) for seed in range(76)]
    first, again = ([(case.fault, case.phase, case.rank == 0) for case in cases] for cases in (drawn[:38], drawn[38:]))
    assert first == again and len(set(first)) == 38
    assert {(fault, is_server) for fault, _, is_server in first} == {
        *itertools.product(MEMBER_FAULTS, (False, True))
    } - {("restart", True)}
    assert {phase for _, phase, _ in first} == set(MEMBER_PHASES)
    assert not {draw(seed, "members").fault for seed in range(76)} & set(LINK_FAULTS)
    assert {case.rank for case in drawn} == {0, 1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "phase", "rank"), [("kill", "leave", 0), ("restart", "send", 2)])
def test_faults_of_members_break_no_promise(fault: str, phase: str, rank: int) -> None:
    outcome = members.check(Case(0, "members", "members", MEMBER_SCHEME, fault, phase, rank, 12))
    assert outcome.struck and not outcome.broken


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES_BETWEEN)
def test_who_is_killed_between_two_rounds_ends_nobody_under_a_server(phase: str) -> None:
    outcome = processes.check(Case(0, "processes", "dedicated server", DRIFT, "kill", phase, 2, 3))
    assert outcome.struck and not outcome.broken


def test_mass_that_no_checkpoint_owes_is_found(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    layout = Layout.of(["w"], [50])
    given = torch.randn(2, 50, generator=draw)
    tallies = [Tally(tmp_path, rank) for rank in (0, 1)]
    for tally, gradient in zip(tallies, given, strict=True):
        tally.give(Bucket(0, layout, gradient, is_last=True))
        tally.apply(Bucket(0, layout, torch.ones(50), is_last=True))
        tally.save(2)
        tally.load(2)
    for lost in (0.0, 0.1):
        owed = given - 1
        owed[1, 7] -= lost
        assert bool(imbalance([tally.sums for tally in tallies], [{"w": row} for row in owed])) == bool(lost)


def test_a_soak_tells_what_grows() -> None:
    flat = [dict.fromkeys(soak.QUANTITIES, 100.0)] * 60
    assert soak.judge("rank 0", flat)["flat"]
    for quantity in soak.QUANTITIES:
        grown = [{**sample, quantity: 100.0 + number} for number, sample in enumerate(flat)]
        row = soak.judge("rank 0", grown)
        assert not row["flat"] and soak.line_of(row).endswith("it grows")


def test_every_promise_has_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "promises.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "| **"))]
    for row in rows:
        named = re.findall(r"`((?:lab/)?tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test is named for: {row}"
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"
    assert len(rows) > 20
