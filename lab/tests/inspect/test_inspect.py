"""The fit check: the right law for samples of a known one, the traps, and one run from the command line to the page."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import cli
from laconic_lab import records
from laconic_lab.errors import TaskError
from laconic_lab.inspect import fit, inspect, tail
from laconic_lab.report import write_report
from laconic_lab.train import Job

N = 20_000
PARAMETERS = 8  # of the CNN
SMALL = ["--workers", "2", "--steps", "3", "--batch", "4", "--at", "1,2", "--rho", "0.02"]


def draw(law: str, n: int = N, seed: int = 0) -> Tensor:
    """A sample of a law, symmetric about 0."""
    made = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, n, generator=made)
    if law == "laplace":
        u = torch.rand(n, generator=made)
        return -torch.log1p(-u) * normal[0].sign()
    return normal[0] if law == "gaussian" else normal[0] / normal[1:].square().mean(0).sqrt()  # Student, 3 degrees


@pytest.mark.parametrize(("law", "closer"), [("laplace", "laplace"), ("gaussian", "gaussian"), ("student", "laplace")])
def test_the_law_of_a_sample_is_found(law: str, closer: str) -> None:
    found = fit(draw(law), 0.01)
    assert found.closer == closer and found.k == 200 and found.entries == N and found.zeros == 0
    assert found.w1_laplace is not None and found.w1_gaussian is not None
    own = {"laplace": found.w1_laplace, "gaussian": found.w1_gaussian}.get(law)
    if own is None:
        assert min(found.w1_laplace, found.w1_gaussian) > 0.05  # a Student is neither
    else:
        assert own < 3 / math.sqrt(N)  # 0.9 / sqrt(N) is expected of the true law


def test_the_laplace_foretells_the_threshold_of_a_laplace_alone() -> None:
    """Student's 0.1 % lie far out, the Gaussian's near: t0 catches too many of one and too few of the other."""
    laplace, gaussian, student = (fit(draw(law, 200_000), 0.001) for law in ("laplace", "gaussian", "student"))
    assert laplace.threshold_ratio == pytest.approx(1, abs=0.06)  # the k-th of k = 200 is known to 1/sqrt(k)/ln(N/k)
    assert laplace.caught_ratio == pytest.approx(1, abs=0.25)
    assert gaussian.threshold_ratio is not None and gaussian.threshold_ratio > 1.4 and gaussian.caught_ratio == 0
    assert student.threshold_ratio is not None and student.threshold_ratio < 0.7
    assert student.caught_ratio is not None and student.caught_ratio > 2


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_scale_changes_nothing(scale: float) -> None:
    one, other = fit(draw("student"), 0.01), fit(draw("student").double() * scale, 0.01)
    for name in ("w1_laplace", "w1_gaussian", "threshold_ratio", "caught_ratio"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6)
    assert other.closer == one.closer and other.mean_abs == pytest.approx(scale * one.mean_abs)


def test_half_precision_is_summed_in_double() -> None:
    """A sum in float16 would end at 65,504, and the squares would vanish."""
    x = torch.full((100_000,), 1e-4, dtype=torch.float16)
    found = fit(x, 0.01)
    assert found.mean_abs == pytest.approx(float(x[0])) and found.rms == pytest.approx(float(x[0]))
    assert fit(torch.full((1 << 17,), 8.0, dtype=torch.float16), 0.01).mean_abs == 8


def test_zeros_have_no_law() -> None:
    found = fit(torch.zeros(500), 0.01)
    assert found.zeros == 500 and found.mean_abs == 0
    assert {found.w1_laplace, found.w1_gaussian, found.closer, found.threshold_ratio, found.caught_ratio} == {None}
    assert tail(torch.zeros(500)) == []
    nothing = fit(torch.full((3,), math.nan), 0.5)
    assert (nothing.entries, nothing.non_finite, nothing.closer) == (0, 3, None)
    assert tail(torch.full((3,), math.nan)) == []


def test_a_constant_is_finite_and_exact() -> None:
    """Every |x| is c: sigma = b = c, so W1 is the mean of |1 - q| over the quantiles q of each law, (2/e, 0.4839)."""
    found = fit(torch.full((N,), -3.0), 0.01)
    assert found.w1_laplace == pytest.approx(2 / math.e, abs=1e-3)
    half_normal = math.erf(1 / math.sqrt(2)), math.sqrt(2 / math.pi)
    mean = half_normal[1] * (2 * math.exp(-0.5) - 1) + 2 * half_normal[0] - 1
    assert found.w1_gaussian == pytest.approx(mean, abs=1e-3)
    assert found.exact_threshold == 3 and found.threshold_ratio == pytest.approx(math.log(100))


def test_what_is_no_number_is_left_out_and_counted() -> None:
    clean = draw("laplace")
    dirty = torch.cat([clean, torch.tensor([math.nan, math.inf, -math.inf])])
    assert fit(dirty, 0.01) == type(fit(clean, 0.01))(**{**vars(fit(clean, 0.01)), "non_finite": 3})


def test_few_entries_prefer_no_law() -> None:
    found = fit(draw("gaussian", 10), 0.01)
    assert found.closer is None and found.w1_gaussian is not None and found.k == 1
    alone = fit(torch.tensor([2.0]), 0.01)
    assert alone.k == alone.entries == 1 and alone.threshold_ratio is None  # all goes: nothing to foretell


def test_a_large_tensor_is_sampled_the_same_way_each_time() -> None:
    x = draw("laplace", 1_200_000)
    found = fit(x, 0.01)
    assert found == fit(x, 0.01) and found.entries == 1_200_000 and found.closer == "laplace"
    assert found.exact_threshold == float(x.abs().sort(descending=True).values[found.k - 1])


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(TaskError, match=r"give a share in \(0, 1\]"):
        fit(torch.ones(3), 0.0)


def test_a_tail_falls_from_all_to_one() -> None:
    found = tail(draw("laplace"))
    assert [t for t, _ in found] == sorted(t for t, _ in found) and found[0][1] == 1 and found[-1][1] == 1 / N
    assert all(share == pytest.approx(math.exp(-t), rel=0.3) for t, share in found if share > 0.005)


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of records and a page, and the tables that were printed."""
    out, printed = tmp_path_factory.mktemp("inspection"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(["inspect", *SMALL, "--out", str(out)]) == 0
    return out, printed.getvalue()


def test_json_the_records_and_the_tables_hold_the_same(
    inspected: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, table = inspected
    assert cli.main(["inspect", *SMALL, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["scheme"] == "topk:rho=0.02" and found["at"] == [1, 2]
    assert len(found["fits"]) == 2 * 2 * (PARAMETERS + 1)
    assert "laconic: step 2/3" in printed.err and "step 3" not in printed.err  # it ends with the last look
    kept = [{k: v for k, v in fact.items() if k not in ("kind", "tail")} for fact in records.read(folder, "fit")]
    assert found["fits"] == kept  # two runs, the same bits
    for one in found["fits"]:
        name = re.escape(one["layer"] or "(whole model)")
        assert re.search(rf"{name} +{one['entries']:,} .* {one['w1_laplace']:.3f} ", table), one


def test_what_is_owed_is_seen(inspected: tuple[Path, str]) -> None:
    found = {(one["step"], one["of"], one["layer"]): one for one in records.read(inspected[0], "fit")}
    large = "6.weight"
    assert found[1, "gradient", large] == {**found[1, "balance", large], "of": "gradient"}  # nothing is owed yet
    assert found[2, "balance", large]["mean_abs"] > 1.5 * found[2, "gradient", large]["mean_abs"]
    assert found[2, "balance", None]["entries"] == 1_199_882
    # Dense keeps nothing, and begins with the same gradient.
    dense = inspect(Job(scheme="dense", workers=2, steps=3, batch=4), [1], 0.02)
    assert {look.of for look in dense} == {"gradient"}
    assert all(look.fit.mean_abs == found[1, "gradient", look.layer]["mean_abs"] for look in dense)


def test_the_page_has_a_panel_for_each_layer(inspected: tuple[Path, str]) -> None:
    folder, _ = inspected
    page = (folder / "report.html").read_text()
    drawn = re.findall(r'aria-label="Tail of ([^"]*)"', page)
    assert len(drawn) == 2 * (PARAMETERS + 1)
    assert drawn[0] == "0.weight" and drawn[PARAMETERS] == "the whole model as one vector"
    assert "<script" not in page and "://" not in page and "nan" not in page
    assert "under topk:rho=0.02: 3 steps" in page and "largest 2\xa0%" in page
    assert write_report(folder).read_text() == page


def test_layers_without_a_tail_have_a_panel_that_says_so(tmp_path: Path, inspected: tuple[Path, str]) -> None:
    lines = [json.loads(line) for line in (inspected[0] / "records.jsonl").read_text().splitlines()]
    gone: dict[str, Any] = {"w1_laplace": None, "w1_gaussian": None, "threshold_ratio": None, "caught_ratio": None}
    for fact in lines[1:]:
        fact.update(gone, closer=None, mean_abs=0.0, rms=0.0, tail=[], layer="<b>" if fact["layer"] else None)
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(tmp_path).read_text()
    assert "every entry is zero" in page and "<b>" not in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--at", "1,x"], "as in --at 10,50"),
        (["--at", "4"], "give --at steps from 1 to 3"),
        (["--rho", "2"], "share in (0, 1]"),
        (["--scheme", "torch-fp16"], "use topk:rho=0.02"),
    ],
)
def test_a_wrong_word_is_one_line_that_says_what_to_write(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", *SMALL, *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and said in printed.err
