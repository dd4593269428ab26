"""laconic demo: a CNN and a small transformer on links from 10mbit to 1gbit, and which scheme pays on which."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic.cli import Commands, as_worker, is_worker, say, table
from laconic.recipes import parse
from laconic.scheme import OuterScheme
from laconic_lab.cli.jobs import run_ranks, say_if_busy
from laconic_lab.errors import LabError
from laconic_lab.network import Lab, LabSpec, Link, netlink, noted_signals
from laconic_lab.train import Job, launch, worker_command
from laconic_lab.train.loop import TrainingLoop
from laconic_lab.train.planning import Losses, smoothed, steps_to
from laconic_lab.train.worker import LossObserver, end_with_the_launcher, make_learner, process_group, slowest

RATES = {"1gbit": 10**9, "100mbit": 10**8, "10mbit": 10**7}  # in the order in which they are measured
_UNSHAPED = "none"
_HOSTS = 2  # a core for each, on a machine of two
_STEPS, _EVAL_EVERY, _PERIOD = 64, 8, 16  # of a run; of averages
_TEST_EXAMPLES = 128  # by which curves are drawn: all of them would take longer than training does
_UNSETTLED = 4  # steps after a change of links that are not timed
_TIMED_S = 3.0  # for steps of gradients on one link, three at least
_LINK_S = 15.0  # of passes over all schemes on one link, of which the shortest time counts: other load comes and goes
_NONE = "none: stay with bf16"
_WORTH = 1.5  # times sooner: less than a tiny model's noise on two cores (1.1 to 1.3 at 1gbit) would change the verdict
_TEXT_BYTES = 1_000_000
_COLUMNS, _LINES = 34, 8  # of a plot
_OWN = "laconic plan --hosts 2 --link 100mbit script.py"


@dataclass(frozen=True)
class Run:
    """One scheme's figures: the validation loss by step, and how long a step takes on each link."""

    scheme: str
    losses: Losses
    bytes_out: float  # a step
    step_s: dict[str, float]  # by link

    def seconds_a_step(self, bits_per_s: float) -> float:
        """The step on a link of any rate: a straight line over the time that a bit takes, between measured ones.

        Where none was measured, the step without a link and the time that its bytes take.
        """
        if len(self.step_s) == 1:
            return self.step_s[_UNSHAPED] + 8 * self.bytes_out / bits_per_s
        points = sorted((1 / RATES[rate] if rate in RATES else 0.0, step_s) for rate, step_s in self.step_s.items())
        for (x0, y0), (x1, y1) in pairwise(points):
            if 1 / bits_per_s <= x1 * (1 + 1e-9):
                return y0 + (y1 - y0) * (1 / bits_per_s - x0) / (x1 - x0)
        return points[-1][1]


class DemoJob(Job):
    """The job by which the demo's workers are started."""

    def words(self) -> list[str]:
        return ["demo", "--folder", str(self.data)]


def jobs(text: Path) -> dict[str, tuple[Job, tuple[str, ...]]]:
    """What is trained, each under bf16, an average every 16 steps, and the scheme that we would choose.

    Learning rates, optimizers and schedules are the tasks' own; the transformer's batch is one that a CPU can bear.
    """
    cnn = Job(workers=_HOSTS, steps=_STEPS, eval_every=_EVAL_EVERY)
    gpt = replace(cnn, task="chars", model="gpt-tiny", data=text, batch=4, context=64)
    plain = ("bf16", f"local:every={_PERIOD}")
    return {
        "a CNN of 1.2 M parameters under SGD, on Fashion-MNIST": (cnn, (*plain, "topk:rho=0.01")),
        "a GPT of 1.0 M parameters under AdamW, on Python's own source": (gpt, (*plain, f"streaming:every={_PERIOD}")),
    }


def add_parser(commands: Commands) -> None:
    """Add `laconic demo`."""
    parser = commands.add_parser(
        "demo",
        help="show in two minutes on which links compression pays, on a CNN and a transformer",
        description="Train a CNN and a small transformer between two hosts, for the same steps under bf16, an average "
        "every 16 steps and a scheme of ours, and time their steps on slower and slower links.",
    )
    parser.add_argument("--json", action="store_true", help="print what was measured, a line for each scheme and link")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a worker
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the workers and print what they measured, or be one of them."""
    if is_worker():
        return as_worker(lambda: _work(args.folder))
    begun = time.monotonic()
    say_if_busy()
    with tempfile.TemporaryDirectory(prefix="laconic-demo-") as name:
        folder = Path(name)
        (folder / "text").write_text(_text(), encoding="utf-8")
        is_timed = _start(folder)
        measured = json.loads((folder / "measured").read_text())
    runs = {name: [Run(**each) for each in of] for name, of in measured.items()}
    if args.json:
        print("\n".join(json.dumps(row) for name, of in runs.items() for row in _rows(name, of)))
        return 0
    for name, of in runs.items():
        print(page(name, of), end="\n\n")
    how = "steps were timed on these links" if is_timed else "computed: a step without a link, and its bytes"
    print(f"Which scheme reaches the same loss {_WORTH} times sooner than bf16 or more ({how}; one seed):\n")
    for name, of in runs.items():
        print(f"  {name}:\n    {verdict(of)}\n    {ladder(of)}")
    print(f"\nIt took {time.monotonic() - begun:.0f} s. Now with a script of your own, as it is:\n\n    {_OWN}")
    return 0


def _text() -> str:
    """A text that every machine has: the first million characters of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(path.read_text(encoding="ascii", errors="ignore") for path in files)
    return text[:_TEXT_BYTES]


def _start(folder: Path) -> bool:
    """Run the workers, on hosts whose links become slower, or here; whether there were such hosts."""
    job = DemoJob(workers=_HOSTS, data=folder)
    try:
        netlink.require()
    except LabError as error:
        say(f"laconic: {error}; so steps on slow links are computed from their bytes")
        launch(job)
        return False
    with noted_signals() as signals, Lab.create(LabSpec(_HOSTS, Link())) as lab, _slowing_down(lab, folder):
        run_ranks(lab, signals, worker_command(job), 0)
    return True


@contextmanager
def _slowing_down(lab: Lab, folder: Path) -> Iterator[None]:
    """Set the rate that the workers ask for by a file `wanted`, and say so by a file of that name."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            wanted = folder / "wanted"
            rate = wanted.read_text() if wanted.exists() else ""
            if rate and not (folder / rate).exists():
                lab.set_rate(RATES[rate])
                (folder / rate).touch()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    (folder / "lab").touch()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _work(folder: Path) -> int:
    """Train under every scheme, then take some steps more on each of the slower links; the first worker writes."""
    end_with_the_launcher()
    with process_group("gloo"):
        leads = dist.get_rank() == 0
        trained = {name: [_train(job, s) for s in of] for name, (job, of) in jobs(folder / "text").items()}
        for rate in (_UNSHAPED, *RATES) if (folder / "lab").exists() else (_UNSHAPED,):
            if leads:
                say(f"laconic: timing steps, link: {rate}")
            if leads and rate != _UNSHAPED:
                (folder / "draft").write_text(rate)
                (folder / "draft").replace(folder / "wanted")
                while not (folder / rate).exists():
                    time.sleep(0.02)
            dist.barrier()
            loops = [pair for of in trained.values() for pair in of]
            begun, passes = time.monotonic(), 0
            while passes == 0 or slowest(time.monotonic() - begun) < passes / (passes + 1) * _LINK_S:
                for loop, measured in loops:
                    measured.step_s[rate] = min(_time(loop), measured.step_s.get(rate, math.inf))
                passes += 1
        if leads:
            facts = {name: [vars(measured) for _, measured in of] for name, of in trained.items()}
            (folder / "measured").write_text(json.dumps(facts))
        for loop, _ in (pair for of in trained.values() for pair in of):
            dist.barrier()
            loop.learner.session.close()  # type: ignore[union-attr]
    return 0


def _train(job: Job, scheme: str) -> tuple[TrainingLoop, Run]:
    job = replace(job, scheme=scheme)
    if dist.get_rank() == 0:
        say(f"laconic: training {job.model or 'the CNN'} under {scheme}, {job.steps} steps")
    torch.manual_seed(job.seed)
    data = job.load_data()
    data = replace(data, test_inputs=data.test_inputs[:_TEST_EXAMPLES], test_targets=data.test_targets[:_TEST_EXAMPLES])
    learner = make_learner(job, data, torch.device("cpu"))
    loop = TrainingLoop(job, learner.course, learner, learner.group)
    observer = LossObserver()
    loop.run_(observer)
    sent = statistics.fmean(fact["bytes_out"] for fact in loop.facts)
    return loop, Run(scheme, observer.losses, sent, {})


def _time(loop: TrainingLoop) -> float:
    """The step on the present link: over some steps, or over a period, in which models exchange all of themselves."""
    expected_s = _TIMED_S
    for _ in range(_UNSETTLED if loop.learner.owns_model else 1):
        expected_s = slowest(loop.step_()["ms"] / 1e3)
    number = _PERIOD if loop.learner.owns_model else max(3, min(10, round(_TIMED_S / expected_s)))
    dist.barrier()
    scheme = parse(loop.job.scheme)
    exchanges = scheme.when.fragments if isinstance(scheme, OuterScheme) else 0
    return slowest(_mean_step([loop.step_()["ms"] / 1e3 for _ in range(number)], exchanges))


def _mean_step(durations_s: Sequence[float], exchanges: int) -> float:
    """The mean of a period in which the longest steps wait for an exchange, and the lower quartile stands for the rest.

    So what other processes on this machine take of its cores counts little.
    """
    low, *_ = statistics.quantiles(durations_s, n=4)
    longest = sorted(durations_s)[len(durations_s) - exchanges :]
    return (low * (len(durations_s) - exchanges) + sum(longest)) / len(durations_s)


def _target(runs: Sequence[Run]) -> float:
    """The loss that all of them reached."""
    return max(smoothed(each.losses)[-1][1] for each in runs)


def gains(runs: Sequence[Run], bits_per_s: float) -> dict[str, float]:
    """How many times sooner than bf16, the first, each of the others reaches the loss that all reached."""
    target = _target(runs)
    seconds = [(steps_to(target, each.losses) or _STEPS) * each.seconds_a_step(bits_per_s) for each in runs]
    return {each.scheme: seconds[0] / own for each, own in zip(runs[1:], seconds[1:], strict=True)}


def _rows(name: str, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    target = _target(runs)
    for each in runs:
        for rate, bits_per_s in {**RATES, _UNSHAPED: 1e12}.items():
            yield {
                "model": name,
                "scheme": each.scheme,
                "link": rate,
                "ms a step": round(1e3 * each.seconds_a_step(bits_per_s), 1),
                "kB out a step": round(each.bytes_out / 1e3, 1),
                "loss at the end": round(each.losses[-1][1], 4),
                f"steps to {target:.2f}": round(steps_to(target, each.losses) or _STEPS, 1),
                "times sooner than bf16": round({runs[0].scheme: 1.0, **gains(runs, bits_per_s)}[each.scheme], 2),
            }


def verdict(runs: Sequence[Run]) -> str:
    """The best scheme on each measured link, and those that are nearly as good."""
    words = []
    for rate, bits_per_s in reversed(RATES.items()):
        by_scheme = gains(runs, bits_per_s)
        best = max(by_scheme.values())
        winners = [scheme for scheme, gain in by_scheme.items() if gain * _WORTH >= best]
        words.append(f"at {rate} " + (f"{' or '.join(winners)}, {best:.1f}x" if best >= _WORTH else "none"))
    return "; ".join(words)


def ladder(runs: Sequence[Run]) -> str:
    """The rates between which each scheme is the soonest."""
    rates = [10 ** (exponent / 20) for exponent in range(140, 201)]  # 10mbit to 10gbit

    def winner(bits_per_s: float) -> str:
        scheme, gain = max(gains(runs, bits_per_s).items(), key=lambda pair: pair[1])
        return scheme if gain >= _WORTH else _NONE

    spans = [(scheme, list(of)) for scheme, of in groupby(rates, winner)]
    pays_not = [scheme for scheme, _ in spans].index(_NONE) if _NONE in dict(spans) else len(spans)
    spans = spans[: pays_not + 1]  # what a faster link seems to bring after that is noise of step times
    ends = [f"up to about {Link(int(float(f'{of[-1]:.0e}')))}: {scheme}" for scheme, of in spans[:-1]]
    return "; ".join([*ends, f"{'beyond' if ends else 'on all links'}: {spans[-1][0]}"])


def page(name: str, runs: Sequence[Run]) -> str:
    """Two plots and a table."""
    marks = {each.scheme: mark for each, mark in zip(runs, ["b", "l", "*"], strict=True)}
    by_step = {mark: each.losses for each, mark in zip(runs, marks.values(), strict=True)}
    slow = {mark: _in_seconds(each, RATES["100mbit"]) for each, mark in zip(runs, marks.values(), strict=True)}
    plots = zip(plot(by_step, "steps"), plot(slow, "s at 100mbit"), strict=True)
    key = ", ".join(f"{mark} {scheme}" for scheme, mark in marks.items())
    links = (*reversed(RATES), _UNSHAPED)
    head = ["scheme", "loss", "kB/step", *(f"ms at {link}" for link in links)]
    rates = {**RATES, _UNSHAPED: 1e12}
    rows = [
        [each.scheme, f"{each.losses[-1][1]:.3f}", f"{each.bytes_out / 1e3:,.0f}"]
        + [f"{1e3 * each.seconds_a_step(rates[link]):,.0f}" for link in links]
        for each in runs
    ]
    lines = [f"{left:<42}{right}".rstrip() for left, right in plots]
    title = f"{name}: {_HOSTS} hosts, {_STEPS} steps under each scheme"
    return "\n".join([title, "", f"validation loss ({key})", *lines, "", table(head, rows)])


def _in_seconds(run: Run, bits_per_s: float) -> Losses:
    return [(step * run.seconds_a_step(bits_per_s), loss) for step, loss in run.losses]


def plot(curves: Mapping[str, Losses], unit: str) -> list[str]:
    """Curves as lines of text; where two meet, the later one of them is seen."""
    last = max(x for points in curves.values() for x, _ in points)
    values = [y for points in curves.values() for _, y in points]
    low, high = min(values), max(values)
    grid = [[" "] * _COLUMNS for _ in range(_LINES)]
    for mark, points in curves.items():
        for (x0, y0), (x1, y1) in pairwise(points):
            for column in range(round((_COLUMNS - 1) * x0 / last), round((_COLUMNS - 1) * x1 / last) + 1):
                share = min(1.0, max(0.0, (column / (_COLUMNS - 1) * last - x0) / max(x1 - x0, 1e-9)))
                y = y0 + (y1 - y0) * share
                grid[round((_LINES - 1) * (high - y) / max(high - low, 1e-9))][column] = mark
    labels = [f"{high:.1f}", *[""] * (_LINES - 2), f"{low:.1f}"]
    axis = f"    0{f'{last:.0f} {unit}':>{_COLUMNS - 1}}"
    return [*(f"{label:>4}|{''.join(row)}" for label, row in zip(labels, grid, strict=True)), axis]
