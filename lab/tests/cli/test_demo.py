"""The first command of a newcomer: what it concludes from measured steps, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import laconic
from laconic import cli
from laconic_lab.cli import demo
from laconic_lab.cli.demo import Run, gains, ladder, page, plot, verdict
from laconic_lab.errors import TaskError
from laconic_lab.network import netlink
from laconic_lab.train.planning import plan_script


def _run(scheme: str, steps_to_one: float, unshaped_s: float, bits: float) -> Run:
    """A loss that falls in a straight line to 1.0, and a step that takes as long as its bits."""
    losses = [(float(step), 3.0 - 2.0 * step / steps_to_one) for step in range(0, 97, 12)]
    step_s = {"none": unshaped_s} | {rate: unshaped_s + bits / per_s for rate, per_s in demo.RATES.items()}
    return Run(scheme, losses, bits / 8, step_s)


RUNS = [
    _run("bf16", 84, 0.10, 2e7),
    _run("local:every=16", 90, 0.11, 1.25e6),
    _run("topk:rho=0.01", 86, 0.12, 2e5),
]


def test_steps_between_links_lie_on_a_line() -> None:
    assert RUNS[0].seconds_a_step(1e8) == pytest.approx(0.3)
    assert RUNS[0].seconds_a_step(2e8) == pytest.approx(0.2)
    assert RUNS[0].seconds_a_step(1e12) == pytest.approx(0.1, abs=1e-3)
    assert Run("bf16", [], 1e6, {"none": 0.1}).seconds_a_step(1e7) == pytest.approx(0.9)  # without a lab


def test_gains_are_of_the_time_to_a_loss_that_all_reached() -> None:
    slow = gains(RUNS, 1e7)
    assert slow["topk:rho=0.01"] == pytest.approx(2.1 / 0.14 * 84 / 86, rel=0.05)
    assert slow["local:every=16"] < slow["topk:rho=0.01"]
    assert gains(RUNS, 1e12)["topk:rho=0.01"] < 1


def test_the_verdict_names_a_scheme_only_where_it_pays() -> None:
    assert verdict(RUNS).startswith("at 10mbit topk:rho=0.01, 14.")
    assert verdict(RUNS).endswith("at 1gbit none")
    assert ladder(RUNS).startswith("up to about ") and ladder(RUNS).endswith("beyond: none: stay with bf16")
    alike = [RUNS[0], _run("local:every=16", 86, 0.12, 2.1e5), RUNS[2]]
    assert verdict(alike).startswith("at 10mbit local:every=16 or topk:rho=0.01, ")


def test_curves_fit_a_terminal() -> None:
    lines = page("a net", RUNS).splitlines()
    assert max(map(len, lines)) <= 90 and any("*" in line for line in lines)
    first, *_, axis = plot({"b": [(0.0, 2.0), (10.0, 1.0)]}, "s")
    assert first.startswith(" 2.0|b") and axis.endswith("10 s")


@pytest.mark.slow  # two minutes on two cores
def test_the_demo_shows_a_gain_on_slow_links(tmp_path: Path) -> None:
    netlink.require()
    ran = subprocess.run(
        [sys.executable, "-m", "laconic", "demo", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(rows) == 2 * 3 * 4
    for scheme in ("topk:rho=0.01", "streaming:every=16"):
        sooner = {row["link"]: row["times sooner than bf16"] for row in rows if row["scheme"] == scheme}
        assert sooner["10mbit"] > 2 and sooner["none"] < 1.3


SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
for _ in range(int(sys.argv[2])):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).logsumexp(1).mean().backward()
    optimizer.step()
    schedule.step()
print("trained to the end")
"""


@pytest.mark.parametrize(("steps", "code"), [("400", 0), pytest.param("5", 1, marks=pytest.mark.slow)])
def test_a_plan_of_a_script_that_knows_nothing_of_it(steps: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    schemes = ["--scheme", "bf16", "--scheme", "topk:rho=0.05", "--scheme", "overlap:rho=0.05"]  # with hooks of steps
    words = ["plan", "--workers", "2", *schemes, "--json", str(script), "0.1", steps]
    ran = subprocess.run([sys.executable, "-m", "laconic", *words], capture_output=True, text=True, check=False)
    assert bool(ran.returncode) == bool(code), ran.stderr
    if code:
        assert "ended after 5 steps" in ran.stderr
    else:
        rows = json.loads(ran.stdout.splitlines()[-1])["rows"]
        assert {row["scheme"] for row in rows} == set(schemes[1::2]) and "trained" not in ran.stdout


@pytest.mark.parametrize("call", ["follow(None, None, 'streaming')", "attach(None, 'bf16')"])
def test_a_script_that_uses_laconic_is_not_trained_to_its_end(call: str, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(f"import laconic\nlaconic.{call}\n")
    known = laconic.follow, laconic.attach
    with pytest.raises(TaskError, match="uses laconic already; plan it as it was before"):
        plan_script([str(script)], (), 10)
    assert (laconic.follow, laconic.attach) == known


def test_a_script_says_itself_how_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    assert cli.main(["plan", "--batch", "4", str(tmp_path / "own.py")]) == 2
    assert "--batch is for built-in tasks" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path / "own.py"), "--hosts", "2"]) == 2
    assert "options of the plan come before it" in capsys.readouterr().err
    assert cli.main(["plan", "--workers", "1"]) == 2
    assert "give it 2 or more" in capsys.readouterr().err
    assert cli.main(["plan", "none.py"]) == 2
    assert "there is no script none.py" in capsys.readouterr().err
