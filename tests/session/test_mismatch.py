"""Replicas that drift: seen by eight bytes, named, and mended if that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.session import OnMismatch, Replicas
from laconic.session.mismatch import fingerprint
from laconic.transport import InProcess, in_process
from tests.ddp_training import TINY_BUCKET_MB, Net, batch
from tests.logs import logged
from tests.virtual import one_core
from tests.workers import WorkerPool, equal_everywhere, flat_parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("n", [1, 7, 1000, (1 << 18) + 3])
def test_a_fingerprint_tells_any_bit_and_any_order(n: int, dtype: torch.dtype) -> None:
    x = (100 * torch.randn(n, generator=torch.Generator().manual_seed(n))).to(dtype)
    known = int(fingerprint(x))
    shifted = torch.cat([x[:1], x])[1:]  # the same numbers, not at the beginning of a word
    assert int(fingerprint(shifted)) == int(fingerprint(x.view(-1, 1))) == known
    raw = x.view(torch.uint8)
    for place in {0, raw.numel() // 2, raw.numel() - 1}:
        for bit in (0, 7):
            raw[place] ^= 1 << bit
            assert int(fingerprint(x)) != known
            raw[place] ^= 1 << bit
    assert int(fingerprint(x)) == known
    if n > 1:
        assert int(fingerprint(x.roll(1))) != known and int(fingerprint(x.flip(0))) != known


def _checked(
    on_mismatch: OnMismatch, spoilt: dict[int, float], num_workers: int = 4
) -> tuple[list[dict[str, Tensor]], Any]:
    """What workers have after a look, some of whom had another second parameter, and what was said."""

    def work(transport: InProcess) -> dict[str, Tensor]:
        parameters = {
            "a": torch.arange(5.0),
            "b": torch.full((2, 3), spoilt.get(transport.rank, 1.0)),
            "c": torch.ones(()),
        }
        before = transport.traffic.copy()
        Replicas(parameters, transport, every=1, on_mismatch=on_mismatch).check_()
        assert transport.traffic.copy() == before
        return parameters

    with logged() as caught, one_core():
        after = in_process(num_workers, work)
    return after, [each for each in caught]


def test_replicas_that_are_alike_are_left_alone() -> None:
    for on_mismatch in ("warn", "error", "heal"):
        assert _checked(on_mismatch, {})[1] == []


def test_who_differs_is_named_and_left_as_it_is_or_mended() -> None:
    named = "the parameters of ranks 1, 3 are not those of ranks 0, 2, first in 'b'; look for what changes them"
    after, said = _checked("warn", {1: 5.0, 3: torch.nan})
    assert len(said) == 1 and said[0].startswith(named) and float(after[1]["b"][0, 0]) == 5
    after, said = _checked("heal", {1: 5.0, 3: torch.nan})
    assert len(said) == 1 and said[0].startswith(named) and said[0].endswith("they are now those of rank 0")
    assert all(torch.equal(each["b"], torch.ones(2, 3)) for each in after)
    after, said = _checked("heal", {0: -1.0})
    assert said[0].startswith("the parameters of rank 0 are not those of ranks 1, 2, 3, first in 'b'")
    assert all(torch.equal(each["b"], torch.ones(2, 3)) for each in after)
    with pytest.raises(laconic.LaconicError, match="the parameters of rank 1 are not those of rank 0, first in 'b'"):
        _checked("error", {1: 5.0}, num_workers=2)


def _drifted(text: str, on_mismatch: OnMismatch, pipeline: bool) -> dict[str, Any]:
    """Five steps, after the second of which rank 2 changes a parameter; looked at in the second and the fourth."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=TINY_BUCKET_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    session = laconic.attach(ddp, text, pipeline=pipeline, on_mismatch=on_mismatch, check_replicas_every=2)
    seen = []
    with logged() as caught:
        for number in range(5):
            x, y = batch(number)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(x), y)
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            except laconic.LaconicError:
                break
            optimizer.step()
            if number == 1 and dist.get_rank() == 2:
                ddp.module.body.weight.data[3, 4] += 1e-3
            seen.append(equal_everywhere(flat_parameters(ddp)))
    error = str(session.error)
    session.close()
    return {"equal": seen, "error": error, "said": [each for each in caught]}


@pytest.mark.parametrize(
    ("text", "on_mismatch", "pipeline"),
    [
        ("dense", "warn", False),
        ("topk:rho=0.05", "heal", True),
        ("topk:rho=0.05", "heal", False),
        ("maxnorm:bits=4", "error", True),
    ],
)
def test_a_rank_that_drifts_under_ddp(
    four_workers: WorkerPool, text: str, on_mismatch: OnMismatch, pipeline: bool
) -> None:
    named = "the parameters of rank 2 are not those of ranks 0, 1, 3, first in 'body.weight'"
    results = four_workers.run(_drifted, text, on_mismatch, pipeline)
    for rank, result in enumerate(results):
        ends = {"warn": [False, False], "heal": [True, True], "error": []}[on_mismatch]
        assert result["equal"] == [True, False, False, *ends]
        assert (named in result["error"]) == (on_mismatch == "error")
        assert [named in said for said in result["said"]] == [True] * (rank == 0 and on_mismatch != "error")
