"""What a follower saves, and which states it takes."""

from __future__ import annotations

import pytest
import torch

from laconic import StateError
from tests.gossiping import learner_at
from tests.local_mailbox import local_mailboxes


def test_the_state_of_both_halves_is_saved(halved: None) -> None:
    boxes = local_mailboxes(2)
    scheme = "scheme:quantize=residue,exchange=gossip(mode=paired,grace=0)"
    learners = [learner_at(box, scheme, 0.1) for box in boxes]
    for number in range(6):
        for learner in learners:
            learner.step(number)
    saved = learners[0].follower.state_dict()
    later = learner_at(local_mailboxes(2)[0], scheme, 0.1).follower
    later.load_state_dict(saved)
    kept = saved["modulo"]
    loaded = later.state_dict()["modulo"]
    assert len(kept["reach"]) == 2 and any(bool(reach.any()) for reach in kept["reach"])
    assert all(torch.equal(new, old) for new, old in zip(loaded["reach"], kept["reach"], strict=True))
    assert torch.equal(loaded["last"], kept["last"])


def test_states_are_checked() -> None:
    box = local_mailboxes(1)[0]
    learner = learner_at(box, "gossip", 0.1)
    saved = learner.follower.state_dict()
    learner.follower.load_state_dict(saved)
    with pytest.raises(StateError, match="same number of workers"):
        learner.follower.load_state_dict({**saved, "num_workers": 3})
    with pytest.raises(StateError, match="another model"):
        learner.follower.load_state_dict({**saved, "groups": [5]})
    with pytest.raises(StateError, match=r"the state is of gossip:rho=0\.2; resume with that scheme"):
        learner.follower.load_state_dict(learner_at(box, "gossip:rho=0.2", 0.1).follower.state_dict())
    with pytest.raises(StateError, match="no state of a follower"):
        learner.follower.load_state_dict({"format": 1})
