"""Numbers change by decision only: `python -m tests.golden` writes down what they are."""

from __future__ import annotations

import json

import pytest

from tests import golden
from tests.parts import ALL_TEXTS, gossip_texts, outer_texts

WRITTEN = json.loads(golden.FILE.read_text())
# The longer course with the kernels of this machine: they give the reference's bits, in half of its time.
KERNELS = {"plain": "", "overflow": "reference"}


def test_every_deterministic_scheme_has_a_trajectory() -> None:
    assert set(golden.NOT_DETERMINISTIC) <= {*ALL_TEXTS, *gossip_texts(), *outer_texts()}
    assert set(WRITTEN) == set(golden.TEXTS)


@pytest.mark.parametrize("text", golden.TEXTS)
def test_a_trajectory_is_the_one_written_down(text: str) -> None:
    for course in golden.courses_of(text):
        found, written = golden.trajectory(text, course, kernels=KERNELS[course]), WRITTEN[text][course]
        if "digest" in written:
            assert found == written, course
        else:
            assert found["sample"] == pytest.approx(written["sample"], rel=1e-6, abs=golden.tolerance(text)), course
