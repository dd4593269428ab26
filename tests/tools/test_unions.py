"""Many virtual workers as rows of a matrix are what a session makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic import Scheme, Session, parse
from laconic.testing import InProcess
from tests.virtual import LAYOUTS, gradients, in_process, one_step
from unions import SCHEMES, Exchange, Run, row

STEPS, WORKERS = 8, 4
LAYOUT = LAYOUTS[1]


@pytest.mark.parametrize("text", [*SCHEMES, "overlap:rho=0.02,score=member,down_rho=0.04"])
def test_a_matrix_of_workers_exchanges_as_sessions_do(text: str) -> None:
    scheme = parse(text)
    assert isinstance(scheme, Scheme)

    def work(transport: InProcess) -> tuple[list[Tensor], int, int]:
        session = Session(scheme, transport)
        applied = []
        for step in range(STEPS):
            out = one_step(session, gradients(transport.rank, step, [LAYOUT]), [LAYOUT])
            applied.append(torch.cat([out[name] for name in LAYOUT.names]))
        by_kind = session.stats().by_kind
        return applied, by_kind["up"].bytes_out, by_kind["down"].bytes_in

    expected, up, down = in_process(WORKERS, work, num_servers=1)[0]
    exchange = Exchange(scheme, LAYOUT, WORKERS, torch.device("cpu"))
    sizes = []
    for step in range(STEPS):
        given = [gradients(rank, step, [LAYOUT]) for rank in range(WORKERS)]
        matrix = torch.stack([torch.cat([own[name] for name in LAYOUT.names]) for own in given])
        applied, size = exchange(matrix, step)
        torch.testing.assert_close(applied, expected[step], rtol=2**-7, atol=1e-5)  # sums in another order, then bf16
        sizes.append(size)
    assert (sum(size.up for size in sizes), sum(size.down for size in sizes)) == (up, down)


def test_a_row_has_the_mean_and_each_seed() -> None:
    run = Run(SCHEMES[0], 2, 2, 0, steps=4, batch=8, device="cpu", data=None)
    made = row(run, [run.result()])
    assert made["labels"] == 2 and made["accuracy by seed"] == [pytest.approx(made["accuracy"], abs=0.01)]
    assert 1 < made["|U|/k"] <= 2 and made["server MB out a step"] > made["server MB in a step"] > 0
