"""What pairs of ranks send each other, as the backend's own messages find it."""

from __future__ import annotations

import json
import sys
from itertools import combinations, permutations

import pytest

from laconic.planning import PairLink, links
from laconic.planning.links import measure_pairs, rounds_of, some_pairs
from laconic.transport import world
from laconic_lab.errors import LabError
from laconic_lab.network import Lab, LabSpec, Link, netlink, noted_signals, run
from tests.workers import WorkerPool

try:
    netlink.require()
    MISSING = ""
except LabError as error:
    MISSING = str(error)

ON_A_HOST = """
import json, os
import torch.distributed as dist
from dataclasses import astuple
from laconic.planning.links import measure_pairs
from laconic.transport import world
os.environ.update(RANK=os.environ["LACONIC_HOST"], WORLD_SIZE=os.environ["LACONIC_HOSTS"])
dist.init_process_group("gloo")
found = measure_pairs(world())
if dist.get_rank() == 0:
    print(json.dumps([astuple(link) for link in found]), flush=True)
dist.barrier()
os._exit(0)
"""


def _measured(seconds: float) -> tuple[PairLink, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "MOST_BYTES", 4 * links.FIRST_BYTES)
        patch.setattr(links, "PAIRS_S", seconds)
        return measure_pairs(world())


def test_all_ranks_hear_of_all_pairs_both_ways(four_workers: WorkerPool) -> None:
    told = four_workers.run(_measured, 60.0)
    assert all(other == told[0] for other in told)
    assert [(link.source, link.target) for link in told[0]] == list(permutations(range(4), 2))
    assert all(link.latency_s > 0 and link.bytes_per_s > 0 and link.settled for link in told[0])


def test_pairs_that_there_is_no_time_for_are_left_out(four_workers: WorkerPool) -> None:
    told = four_workers.run(_measured, 0.0)
    assert all(other == told[0] for other in told)
    assert [(link.source, link.target) for link in told[0]] == [(0, 1), (1, 0), (2, 3), (3, 2)]


@pytest.mark.parametrize("num_ranks", [1, 2, 7, 8, 9, 32])
def test_each_rank_is_measured_and_in_a_round_once(num_ranks: int) -> None:
    pairs = some_pairs(num_ranks)
    if num_ranks <= 8:
        assert pairs == list(combinations(range(num_ranks), 2))
    assert {rank for pair in pairs for rank in pair} == set(range(num_ranks)) or num_ranks == 1
    rounds = rounds_of(pairs)
    assert sorted(pair for one in rounds for pair in one) == sorted(set(pairs))
    assert all(len({rank for pair in one for rank in pair}) == 2 * len(one) for one in rounds)
    assert len(rounds) <= 9


@pytest.mark.slow
@pytest.mark.xdist_group("lab")
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_slow_link_of_a_lab_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with noted_signals() as signals, Lab.create(LabSpec(3, Link.parse("200mbit"), {2: Link.parse("10mbit")})) as lab:
        assert run(lab, [sys.executable, "-c", ON_A_HOST], signals, marked=False, env={"OMP_NUM_THREADS": "1"}) == 0
    found = [PairLink(*link) for link in json.loads(capfd.readouterr().out.splitlines()[-1])]
    assert len(found) == 6
    for pair in found:
        most = 10e6 if 2 in (pair.source, pair.target) else 200e6
        # A busy machine can only make it less, and a queue's burst more by some percent.
        assert 0.3 * most < 8 * pair.bytes_per_s < 1.1 * most, pair
