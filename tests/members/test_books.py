"""The law of members: nothing is lost and anchors are equal, whatever joins, leaves, dies, lags or comes back."""

from __future__ import annotations

import json
import random

import pytest
import torch

from laconic.errors import PeerError
from laconic.members.fragment import MOST_GONE
from tests.members.virtual import Snapshot, VirtualMember, VirtualRun, small_model

SCHEMES = (
    "streaming:every=4,fragments=2,delay=1",  # momentum by agreement
    "streaming:every=2,fragments=1,delay=0,bits=2,momentum=0",
    "diloco:every=3",
    "sparseloco:every=3,rho=0.25,decay=1,chunk=8",
    "local:every=2",
    "muloco:every=4,fragments=2,delay=1",
)
MASKED = [(scheme, bits) for scheme in (*SCHEMES[:3], *SCHEMES[4:]) for bits in (8, 16)]  # sparseloco sends positions
RULES = ("clipped", "median+near", "trimmed+pairs")


def _let_others_train(run: VirtualRun, member: VirtualMember, rng: random.Random) -> None:
    """Under masks who leaves waits for a sum with others in it."""
    run.now += rng.random()
    run.deliver(run.syncer.on_time(run.now))
    for other in run.members:
        if other is not member and other.connection is not None:
            other.train(rng)
            for _ in range(8):
                rng.choice([other.pass_up, other.pass_down])()


def _leave(run: VirtualRun, member: VirtualMember, rng: random.Random) -> None:
    """What `Member.leave()` does, over the queues; it may be cut off, or the server die, after any message."""
    member.send(member.replica.leave())
    while not member.replica.has_left:
        for _ in range(rng.randrange(1, 12)):
            rng.choice([member.pass_up, member.pass_down])()
        if run.syncer.mask_bits:
            _let_others_train(run, member, rng)
        event = rng.random()
        if event < 0.02:
            run.restart_server()
        elif event < 0.1:
            member.cut()
        if member.connection is None:
            member.connect()
    run.left.add(member.process)
    for number, deposited in member.deposited.items():
        stated = member.replica.pieces[number].owed() if run.syncer.mask_bits else member.bequeathed[number]
        assert torch.allclose(deposited, member.counted[number] + stated, atol=1e-4)
    member.cut()
    run.members.remove(member)


def _add_member(run: VirtualRun, rng: random.Random) -> None:
    number = len(run.by_process)
    member = VirtualMember(run, f"m{rng.randrange(6) if rng.random() < 0.2 else number}", number)
    if all(member.id != other.id for other in run.members):
        run.members.append(member)
        member.connect()


def _save_or_restore(run: VirtualRun, snapshots: list[Snapshot], rng: random.Random) -> None:
    """Save a checkpoint of a member, or let a process begin from an old one whose member is not there."""
    settled = [m for m in run.members if m.connection is not None and m.replica.is_ready and not m.unsettled]
    if settled and rng.random() < 0.5:
        snapshots.append(rng.choice(settled).snapshot())
        return
    absent = [snapshot for snapshot in snapshots if all(snapshot.id != member.id for member in run.members)]
    if absent:
        member = VirtualMember.restore(run, rng.choice(absent))
        if member.process in run.left:
            member.connect()
            with pytest.raises(PeerError, match="has left"):
                member.pass_down()
            member.cut()
        else:
            run.members.append(member)
            member.connect()


def _play(scheme: str, seed: int, combine: str, mask_bits: int, num_events: int = 500) -> VirtualRun:
    rng = random.Random(seed)
    run = VirtualRun(scheme, quorum=rng.choice([1, 2]), wait_budget_s=3.0, combine=combine, mask_bits=mask_bits)
    snapshots: list[Snapshot] = []
    for _ in range(num_events):
        run.now += rng.random()
        event = rng.random()
        connected = [member for member in run.members if member.connection is not None]
        apart = [member for member in run.members if member.connection is None]
        if event < 0.04 and len(run.members) < 6:
            _add_member(run, rng)
        elif event < 0.05 and connected:
            rng.choice(connected).cut()
        elif event < 0.09 and apart:
            rng.choice(apart).connect()
        elif event < 0.095 and len(connected) > 1:
            died = rng.choice(connected)
            died.cut()
            run.members.remove(died)
        elif event < 0.105 and len(connected) > 1 and connected[0].replica.is_ready:
            _leave(run, connected[0], rng)
        elif event < 0.11:
            run.restart_server()
        elif event < 0.13:
            _save_or_restore(run, snapshots, rng)
        elif event < 0.17:
            run.deliver(run.syncer.on_time(run.now))
        elif run.members:
            member = rng.choice(run.members)
            if rng.random() < 0.4:
                member.train(rng)
            for _ in range(rng.randrange(4)):
                rng.choice([member.pass_up, member.pass_down])()
            run.check_books(member)
    return run


def _check(scheme: str, seeds: range, combine: str = "mean", mask_bits: int = 0) -> int:
    num_rounds = 0
    for seed in seeds:
        run = _play(scheme, seed, combine, mask_bits)
        num_rounds += run.syncer.rounds
        for member in run.members:
            run.check_books(member)
            for number, piece in member.replica.pieces.items():
                if piece.version >= 0:
                    assert torch.equal(piece.anchor, run.anchors[number, piece.version])
    return num_rounds


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_lost_and_anchors_are_equal(scheme: str) -> None:
    assert _check(scheme, range(3)) > 10


@pytest.mark.parametrize(("scheme", "mask_bits"), MASKED)
def test_nothing_is_lost_under_masks(scheme: str, mask_bits: int) -> None:
    """But what ends with a member that leaves, which it states."""
    assert _check(scheme, range(3), mask_bits=mask_bits) > 10


def test_who_leaves_waits_for_the_answer_to_its_last_question() -> None:
    """What it asked when it came back is answered before, while its drift is still held."""
    run = VirtualRun("local:every=1", wait_budget_s=3.0, quorum=2)
    rng = random.Random(0)
    member = VirtualMember(run, "who", 0)
    run.members = [member]
    member.connect()
    run.settle()
    member.train(rng)
    run.settle()
    member.cut()
    member.connect()  # its drift is held; it asks what became of that
    member.pass_down()
    member.send(member.replica.leave())
    run.settle()
    assert member.replica.has_left
    for number, deposited in member.deposited.items():
        assert torch.allclose(deposited, member.bequeathed[number], atol=1e-4)


@pytest.mark.parametrize("is_back", [True, False])
def test_the_first_round_after_a_restart_has_all_who_come_back_within_a_wait_budget(is_back: bool) -> None:
    run = VirtualRun("local:every=1", wait_budget_s=3.0)
    rng = random.Random(0)
    first, other, gone = run.members = [VirtualMember(run, id, 0) for id in ("first", "other", "gone")]
    for member in run.members:
        member.connect()
        run.settle()
    for _ in range(2):
        for member in run.members:
            member.train(rng)
        run.settle()
    run.members.remove(gone)
    gone.send(gone.replica.leave())
    while gone.up or gone.down:
        gone.pass_up()
        gone.pass_down()
    version = run.syncer.fragments[0].version
    assert version == 2
    run.restart_server()
    first.train(rng)
    first.connect()
    run.settle()
    first.train(rng)
    run.settle()
    assert run.syncer.fragments[0].version == version, "its drift alone would move the anchor all the way"
    if is_back:
        other.train(rng)
        other.connect()
        run.settle()
        other.train(rng)
    else:
        run.now += 3.1
        run.deliver(run.syncer.on_time(run.now))
    run.settle()
    assert run.syncer.fragments[0].version == version + 1
    assert [member.replica.num_counted for member in (first, other)] == [6, 4 + 2 * is_back], "weights, buffers"


@pytest.mark.parametrize("num_joins", [MOST_GONE + 20, pytest.param(5000, marks=pytest.mark.slow)])
def test_what_is_kept_of_members_that_are_gone_is_bounded(num_joins: int) -> None:
    run = VirtualRun("local:every=1")
    for number in range(num_joins):
        member = VirtualMember(run, f"m{number}", number)
        run.members = [member]
        member.connect()
        run.settle()
        member.train(random.Random(number))
        run.settle()
        member.cut()
    syncer = run.syncer
    assert syncer.rounds >= num_joins
    assert len(syncer.members) == MOST_GONE
    assert all(len(fragment.counted) <= MOST_GONE + 1 for fragment in syncer.fragments.values())
    assert len(json.dumps(run.saved[0]["counted"])) < 100 * MOST_GONE
    forgotten = run.by_process["m0/0"]
    run.members = [forgotten]
    forgotten.connect()
    run.settle()
    assert all(torch.equal(p.read(), p.anchor) for p in forgotten.replica.pieces.values()), "it begins anew"


@pytest.mark.parametrize(("scheme", "combine"), list(zip(SCHEMES, 2 * RULES, strict=True)))
def test_the_books_hold_under_every_rule(scheme: str, combine: str) -> None:
    """What is counted is counted once; that of it which a rule clips is stated (test_combine.py)."""
    assert _check(scheme, range(3, 4), combine) > 5


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[3]])
def test_the_books_hold_where_two_servers_share_the_fragments(scheme: str) -> None:
    """Every member is one model in both runs; servers die and connections end apart from each other."""
    rng = random.Random(0)
    runs = [VirtualRun(scheme, share=(index, 2), quorum=1, wait_budget_s=3.0) for index in range(2)]
    for number in range(3):
        model = small_model(number)
        for run in runs:
            run.members.append(VirtualMember(run, f"m{number}", number, model))
            run.members[-1].connect()
    for _ in range(600):
        run = rng.choice(runs)
        run.now += rng.random()
        member = rng.choice(run.members)
        event = rng.random()
        if member.connection is None:
            member.connect()
        elif event < 0.02:
            member.cut()
        elif event < 0.03:
            run.restart_server()
        elif event < 0.3:
            member.train(rng)
        else:
            for _ in range(4):
                rng.choice([member.pass_up, member.pass_down])()
        for other in runs:
            other.check_books(other.members[run.members.index(member)])
    numbers = [set(run.syncer.fragments) for run in runs]
    assert not numbers[0] & numbers[1]
    assert min(run.syncer.rounds for run in runs) > 2
    for run in runs:
        for number, piece in ((n, p) for member in run.members for n, p in member.replica.pieces.items()):
            assert piece.version < 0 or torch.equal(piece.anchor, run.anchors[number, piece.version])


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "mask_bits"), MASKED)
def test_nothing_is_lost_under_masks_in_five_hundred_schedules(scheme: str, mask_bits: int) -> None:
    assert _check(scheme, range(100, 600), mask_bits=mask_bits) > 1500


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_lost_in_a_thousand_schedules(scheme: str) -> None:
    assert _check(scheme, range(100, 1100)) > 8000
