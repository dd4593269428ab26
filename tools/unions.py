"""What a server's answers cost, and what is learned under them: many virtual workers, as rows of one matrix.

    python tools/unions.py --workers 8,16 --seeds 0,1,2 --device cuda      # all schemes, IID and two labels a worker
    python tools/unions.py --workers 4 --steps 20 --scheme topk:rho=0.01,exchange=server --scheme overlap:rho=0.01

The Fashion-MNIST CNN under SGD, one bucket, one server, as `laconic train --in-process` has it, but in a few operations
on all workers' residuals: 150 steps of 16 take seconds on a GPU. Rows are JSON objects, one a line: each scheme
among each number of workers, with means over the seeds. Bytes are those of real frames, a worker's and the server's,
times the number of workers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from laconic.layout import Layout, positions_of
from laconic.recipes import parse
from laconic.scheme import Scheme
from laconic.select import Overlap, TopK
from laconic.wire import FrameShape, write_each
from laconic_lab.tasks import TASKS, Data
from laconic_lab.train import Job
from laconic_lab.train.course import Course

TOPK = "topk:rho=0.01,exchange=server"
SCORED = "overlap:rho=0.01,score=product"
SCHEMES = (TOPK, f"{TOPK}(down_rho=0.03)", SCORED, f"{SCORED},down_rho=0")
_FIRST_STEPS = 2  # left out of the means of bytes and unions: the past says nothing yet


class Sizes(NamedTuple):
    """What one step came to: bytes of one worker's frame and of the answer, entries of the union and of the answer."""

    up: int
    down: int
    union: int
    answered: int


class Exchange:
    """The gradients of all workers become what a server answers: `laconic.Session`'s numbers, on whole matrices."""

    def __init__(self, scheme: Scheme, layout: Layout, num_workers: int, device: torch.device) -> None:
        assert isinstance(scheme.select, TopK) and not scheme.select.per_parameter
        self._scheme = scheme
        self._layout = layout
        self._num_workers = num_workers
        self._density = scheme.select.density_among(num_workers)
        plan = scheme.select.plan(layout, self._density)
        self._fixed = positions_of(plan.fixed, device)
        self.k = plan.k
        self._room = max(1, round(scheme.server.down_rho * layout.num_entries)) if scheme.server.down_rho else 0
        self._residual = torch.zeros(num_workers, layout.num_entries, device=device)
        self._held = torch.zeros(layout.num_entries, device=device)
        self._past = torch.zeros(layout.num_entries, device=device)

    def __call__(self, gradients: Tensor, step: int) -> tuple[Tensor, Sizes]:
        """(what all workers apply, what it came to); the gradients are [workers, entries]."""
        residual = self._residual.add_(gradients)
        selected = self._selected(residual, step)
        values = residual.gather(1, selected)
        fixed_values = residual[:, self._fixed]
        up, _ = self._frame(selected[0], torch.cat([fixed_values[0], values[0]]), step)
        sent = torch.cat([fixed_values, values], 1).to(torch.bfloat16).to(torch.float32)
        residual.scatter_(1, selected, values - sent[:, self._fixed.numel() :])
        residual[:, self._fixed] = fixed_values - sent[:, : self._fixed.numel()]
        held = self._held
        held.index_add_(0, selected.reshape(-1), sent[:, self._fixed.numel() :].reshape(-1))
        held[self._fixed] += sent[:, : self._fixed.numel()].sum(0)
        is_sent = torch.zeros_like(held, dtype=torch.bool)
        is_sent[selected[values != 0]] = True
        union = is_sent.nonzero().view(-1)
        places = self._largest(union).sort().values
        means = held[torch.cat([self._fixed, places])] / self._num_workers
        down, answer = self._frame(places, means, step)
        held[torch.cat([self._fixed, places])] = (means - answer) * self._num_workers
        aggregate = answer[self._fixed.numel() :]
        self._learn(places, aggregate)
        applied = torch.zeros_like(held)
        applied[self._fixed], applied[places] = answer[: self._fixed.numel()], aggregate
        return applied, Sizes(up, down, union.numel(), places.numel())

    def _selected(self, residual: Tensor, step: int) -> Tensor:
        """The positions that each worker sends, [workers, k]."""
        select = self._scheme.select
        sizes = residual.abs()
        sizes[:, self._fixed] = -1
        if not isinstance(select, Overlap):
            return sizes.topk(self.k, sorted=False).indices
        swept = select.swept(self._layout, self._density, step, 0).to(sizes.device)
        at = self._past.nonzero().view(-1)
        if at.numel():
            past = self._past[at]
            score = select.scored
            scale = residual.norm(dim=1, keepdim=True) if score.needs_norm else past.mean()
            sizes[:, at] = score.of(sizes[:, at], past, score.strength, scale)
            sizes[:, self._fixed] = -1
        sizes[:, swept] = -1
        return torch.cat([sizes.topk(self.k, sorted=False).indices, swept.expand(self._num_workers, -1)], 1)

    def _largest(self, union: Tensor) -> Tensor:
        """The places that the server answers, the largest sums of all that it holds, or all that were sent."""
        if not self._room:
            return union
        sums = self._held.abs()
        sums[self._fixed] = -1
        return sums.topk(min(self._room, union.numel()), sorted=False).indices

    def _frame(self, places: Tensor, values: Tensor, step: int) -> tuple[int, Tensor]:
        """The bytes of a frame, and its values as it holds them."""
        num_fixed = self._fixed.numel()
        at, order = places.to("cpu", torch.int32).sort()
        ascending = values.to("cpu", copy=True)
        ascending[num_fixed:] = ascending[num_fixed:][order]
        n, code = self._layout.num_entries, self._scheme.frame_code
        ((frame, decoded),) = write_each(
            [FrameShape(n, at.numel(), num_fixed, code)], [at], [ascending], step=step, bucket=0
        )
        sent = decoded.clone()
        sent[num_fixed:][order] = decoded[num_fixed:]
        num_bytes = min(frame.numel(), FrameShape(n, n, 0, code).num_bytes)  # a dense answer, where that is smaller
        return num_bytes, sent.to(values.device)

    def _learn(self, places: Tensor, aggregate: Tensor) -> None:
        select = self._scheme.select
        if isinstance(select, Overlap) and select.scored.note_ is not None:
            select.scored.note_(self._past, self._past.nonzero().view(-1), places, aggregate)


@dataclass(frozen=True)
class Run:
    """One scheme among so many workers, on data of so many labels each (0: IID), under one seed."""

    scheme: str
    workers: int
    labels: int
    seed: int
    steps: int
    batch: int
    device: str
    data: Path | None

    def result(self) -> dict[str, float]:
        """Train, and say what it came to."""
        job = Job(
            scheme=self.scheme, workers=self.workers, labels_per_worker=self.labels or None, seed=self.seed,
            steps=self.steps, batch=self.batch, device=self.device, data=self.data, servers=1,
        )  # fmt: skip
        data = _data(self.data)
        device = torch.device(self.device)
        courses = [Course(job, data, rank, self.workers) for rank in range(self.workers)]
        torch.manual_seed(self.seed)
        model = TASKS[job.task].model(None).make(data).to(device)
        updater = courses[0].updater(model)
        named = dict(model.named_parameters())
        layout = Layout.of(list(named), [p.shape for p in named.values()])
        scheme = parse(self.scheme)
        assert isinstance(scheme, Scheme)
        exchange = Exchange(scheme, layout, self.workers, device)

        def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, parameters, (inputs,)), targets)

        gradients_of = vmap(grad(loss), in_dims=(None, 0, 0))
        sizes = []
        for step in range(self.steps):
            examples = [course.examples(step) for course in courses]
            inputs, targets = (torch.stack(each).to(device) for each in zip(*examples, strict=True))
            own = gradients_of({name: p.detach() for name, p in named.items()}, inputs, targets)
            flat, size = exchange(torch.cat([own[name].flatten(1) for name in named], 1), step)
            sizes.append(size)
            for (_, parameter), span in zip(named.items(), layout.spans, strict=True):
                parameter.grad = flat[span.start : span.stop].view_as(parameter)
            updater.set_rate_(courses[0].rate(step))
            updater.apply_()
        right, loss_sum, count = courses[0].score(model, device)
        late = Sizes(*(mean(each) for each in zip(*sizes[_FIRST_STEPS:], strict=True)))
        return {
            "accuracy": 100 * right / count,
            "loss": loss_sum / count,
            "up": late.up * self.workers,
            "down": late.down * self.workers,
            "union": late.union / exchange.k,
            "answered": late.answered / exchange.k,
        }


@cache
def _data(folder: Path | None) -> Data:
    return TASKS["fashion-mnist"].load(folder, None)


def row(run: Run, results: list[dict[str, float]]) -> dict[str, Any]:
    """The row of one scheme: means over seeds, and each seed's accuracy."""
    means = {name: mean(result[name] for result in results) for name in results[0]}
    return {
        "scheme": run.scheme,
        "workers": run.workers,
        "labels": run.labels or "all",
        "accuracy": round(means["accuracy"], 3),
        "accuracy by seed": [round(result["accuracy"], 2) for result in results],
        "loss": round(means["loss"], 4),
        "server MB in a step": round(means["up"] / 1e6, 3),
        "server MB out a step": round(means["down"] / 1e6, 3),
        "|U|/k": round(means["union"], 2),
        "answered/k": round(means["answered"], 2),
    }


def _result(run: Run) -> dict[str, float]:
    torch.set_num_threads(1)
    return run.result()


def main() -> int:
    """Run everything that is asked for."""
    parser = argparse.ArgumentParser(prog="python tools/unions.py", description="Schemes of a server, side by side.")
    parser.add_argument("--scheme", action="append", help="may be repeated (default: plain, cut, each score)")
    parser.add_argument("--workers", default="8,16,32,64")
    parser.add_argument("--labels", default="0,2", help="that each worker holds; 0: all, at random")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8, help="examples of each worker at a step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's IDX files (default: the slice)")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    workers, labels, seeds = (
        [int(word) for word in text.split(",")] for text in (args.workers, args.labels, args.seeds)
    )
    about = {name: getattr(args, name) for name in ("steps", "batch", "device", "data")}
    runs = [
        Run(scheme, num, label, seed, **about)
        for num in workers
        for label in labels
        for scheme in args.scheme or SCHEMES
        for seed in seeds
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        results = pool.map(_result, runs)
        for number in range(0, len(runs), len(seeds)):
            of_seeds = [next(results) for _ in seeds]
            print(json.dumps(row(runs[number], of_seeds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
