"""Who talks to whom in gossip."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from laconic import SchemeError, parse
from laconic.exchange import check_peers, matching, neighbours, pick
from laconic.exchange.peers import GRAPHS

LIST = "0-1+1-2+2-3+3-4+4-5+5-6+6-7"


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("peers", GRAPHS)
def test_neighbours_know_each_other_and_reach_everyone(peers: str, num_workers: int) -> None:
    check_peers(peers, num_workers)
    for rank in range(num_workers):
        for peer in neighbours(peers, rank, num_workers):
            assert peer != rank and rank in neighbours(peers, peer, num_workers)
    at_most = {"uniform": num_workers - 1, "ring": 2, "exponential": 2 * math.ceil(math.log2(num_workers or 1))}
    assert all(len(neighbours(peers, rank, num_workers)) <= at_most[peers] for rank in range(num_workers))


@pytest.mark.parametrize("peers,num_workers", [*itertools.product(GRAPHS, [1, 2, 5, 8]), (LIST, 8)])
def test_a_matching_is_made_of_disjoint_pairs_of_neighbours(peers: str, num_workers: int) -> None:
    met = set()
    for step in range(60):
        partner = matching(peers, 3, step, num_workers)
        assert partner == matching(peers, 3, step, num_workers)
        assert all(partner[partner[rank]] == rank for rank in range(num_workers))
        pairs = {(a, b) for a, b in enumerate(partner) if a != b}
        assert all(b in neighbours(peers, a, num_workers) for a, b in pairs)
        alone = [rank for rank in range(num_workers) if partner[rank] == rank]
        assert not any(b in neighbours(peers, a, num_workers) for a, b in itertools.combinations(alone, 2))
        met |= pairs
    assert met == {(a, b) for a in range(num_workers) for b in neighbours(peers, a, num_workers)}


@pytest.mark.parametrize("num_workers", [2, 4, 8, 16])
def test_workers_at_the_corners_of_a_hypercube_agree_after_all_its_directions(num_workers: int) -> None:
    models = torch.randn(num_workers, 5, dtype=torch.float64)
    mean = models.mean(0)
    num_directions = num_workers.bit_length() - 1
    seen = set()
    for turn in range(3 * num_directions, 4 * num_directions):
        partner = matching("uniform", 2, turn, num_workers)
        models = (models + models[partner]) / 2
        seen.add(tuple(partner))
    assert torch.allclose(models, mean.expand_as(models), atol=1e-12)  # a few roundings of float64
    assert len(seen) == num_directions
    assert num_workers < 4 or matching("uniform", 2, 0, num_workers) != matching(
        "uniform", 2, 3 * num_directions, num_workers
    )


def test_a_pick_is_even_and_depends_on_seed_step_and_rank_alone() -> None:
    picked = [pick({1, 4, 6}, 7, step, 2) for step in range(3000)]
    assert picked == [pick([6, 1, 4], 7, step, 2) for step in range(3000)]
    # 1,000 expected of each; the deviation of such a count is 26.
    assert all(abs(picked.count(peer) - 1000) < 130 for peer in (1, 4, 6))
    assert picked != [pick({1, 4, 6}, 8, step, 2) for step in range(3000)]
    assert picked != [pick({1, 4, 6}, 7, step, 3) for step in range(3000)]
    assert pick([], 0, 0, 0) is None


def test_a_wrong_list_of_peers_says_what_to_write() -> None:
    for text, cure in {"0-1+2": "like 0-1+1-2", "0-0": "like 0-1+1-2", "star": "uniform, ring, exponential"}.items():
        with pytest.raises(SchemeError, match=cure.replace("+", r"\+")):
            parse(f"gossip:peers={text}")
    with pytest.raises(SchemeError, match="ranks are 0 to 2"):
        check_peers("0-1+1-3", 3)
    with pytest.raises(SchemeError, match="to rank 2; add a pair"):
        check_peers("0-1+2-3", 4)
