"""Votes on whole matrices are what sessions under a server come to, bit for bit."""

from __future__ import annotations

import pytest

from laconic_lab.train import Job, work_in_process
from laconic_lab.train.result import Result
from votes import SCHEMES, curve


@pytest.mark.parametrize("scheme", [*SCHEMES, "sparse-sign:rho=0.1,weight=0"])
def test_a_matrix_of_workers_votes_as_sessions_do(scheme: str) -> None:
    job = Job(scheme=scheme, workers=3, servers=1, batch=16, steps=6, eval_every=6, in_process=True, quiet=True)
    results: list[Result] = []
    work_in_process(job, results.append, lambda text: None)
    (end,) = curve(job)
    assert end["rounds"] == 6
    assert (end["accuracy"], end["loss"]) == (100 * results[0].accuracy, results[0].loss)
