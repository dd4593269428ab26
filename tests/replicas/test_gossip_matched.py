"""Gossip in step, which is had again bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.transport import InProcess, in_process
from tests.gossiping import MATCHED_TEXTS, Learner, followed, matched, vectors_of


@pytest.mark.parametrize("text", MATCHED_TEXTS)
def test_a_matched_run_is_had_again_bit_for_bit(text: str) -> None:
    first, again = ([learner for learner, _ in matched(text, 4, 12)] for _ in range(2))
    assert torch.equal(vectors_of(first), vectors_of(again))
    assert [learner.follower.stats().bytes_out for learner in first] == [
        learner.follower.stats().bytes_out for learner in again
    ]


@pytest.mark.parametrize("text", MATCHED_TEXTS)
def test_frozen_matched_workers_keep_the_mean_of_all_models(text: str) -> None:
    def work(transport: InProcess) -> tuple[Tensor, Tensor]:
        learner = Learner(text, transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        learner.drift(0)
        before = learner.follower.vector.read()
        for _ in range(20):
            learner.follower.step()
        return before, learner.follower.vector.read()

    before, after = (torch.stack(rows).double() for rows in zip(*in_process(4, work), strict=True))
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=2e-6, rtol=0)  # float32 additions to values near 1


@pytest.mark.parametrize("text", MATCHED_TEXTS)
def test_matched_workers_learn_and_agree(text: str) -> None:
    results = matched(text, 4, 60)
    for _, losses in results:
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    models = vectors_of([learner for learner, _ in results])
    spread = (models - models.mean(0)).norm() / models.mean(0).norm()
    assert spread < 0.5


@pytest.mark.parametrize("text", MATCHED_TEXTS)
def test_five_matched_steps_saved_and_five_more_are_ten(text: str) -> None:
    half = [learner for learner, _ in matched(text, 4, 5)]
    saved = [
        {
            "model": learner.model.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "follower": learner.follower.state_dict(),
        }
        for learner in half
    ]
    rest = [learner for learner, _ in matched(text, 4, 5, first=5, load=saved)]
    whole = [learner for learner, _ in matched(text, 4, 10)]
    assert torch.equal(vectors_of(rest), vectors_of(whole))
    assert rest[0].follower.state_dict().keys() == whole[0].follower.state_dict().keys()


@pytest.mark.parametrize("text", ["gossip:mode=matched", "gossip:mode=matched,rho=0.2", "gossip-every:mode=matched"])
@pytest.mark.parametrize("spoilt", [0, 1])
def test_in_step_a_model_that_is_not_finite_ends_both(text: str, spoilt: int) -> None:
    def work(transport: InProcess) -> str:
        learner = Learner(text + ",seed=2", transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        if transport.rank == spoilt:
            next(learner.model.parameters()).data[0] = torch.nan
        try:
            for _ in range(4):
                learner.follower.step()
        except FrameError as error:
            return str(error)
        return ""

    whys = in_process(2, work)
    assert all("not finite" in why or f"rank {spoilt} sent no request" in why for why in whys)
    assert f"rank {spoilt}" in whys[spoilt] or f"rank {spoilt}" in whys[1 - spoilt]
