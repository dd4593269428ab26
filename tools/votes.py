"""Votes of many workers on one model, as rows of one matrix: thousands of rounds of a deep net in minutes of a GPU.

    python tools/votes.py --data DIR --device cuda --processes 6    # ResNet-56, 15 workers, 3,000 rounds, three seeds

It has the numbers of `laconic train --workers 15 --servers 1 --scheme sparse-sign:rho=0.1` (or sign), but sends
nothing: all workers' backward passes are one CUDA graph, and parameters of one size are selected from together. Rows
are JSON objects, one a line: each scheme after so many rounds, with means over the seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laconic.layout import Layout
from laconic.recipes import parse
from laconic.scheme import Scheme
from laconic.server.vote import take_sides
from laconic_lab.train import Job
from laconic_lab.train.course import Course

SCHEMES = ("sign", "sparse-sign:rho=0.1")
_ROUNDS_BEFORE_CAPTURE = 3  # until cuDNN has chosen its algorithms


class Gradients:
    """Every worker's gradient of one model, whose parameters they share; buffers are each worker's own."""

    def __init__(self, model: nn.Module, layout: Layout, inputs: Tensor, targets: Tensor) -> None:
        num_workers = len(inputs)
        self._models = [model, *(copy.deepcopy(model) for _ in range(num_workers - 1))]
        for other in self._models[1:]:
            for own, shared in zip(other.parameters(), model.parameters(), strict=True):
                own.data = shared.data
        self.rows = torch.zeros(num_workers, layout.num_entries, device=inputs.device)
        shapes = [parameter.shape for parameter in model.parameters()]
        spans = list(zip(layout.spans, shapes, strict=True))
        self._views = [[row[span.start : span.stop].view(shape) for span, shape in spans] for row in self.rows]
        self._examples = inputs, targets  # of all workers, at each round anew
        self._streams = [torch.cuda.Stream() for _ in self._models if inputs.is_cuda]  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_rounds = 0

    def take_(self, examples: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The gradients, [workers, entries], of one batch for each worker."""
        for all_of_one_kind, own in zip(self._examples, zip(*examples, strict=True), strict=True):
            torch.stack(own, out=all_of_one_kind)
        if self._streams and self._graph is None and self._num_rounds == _ROUNDS_BEFORE_CAPTURE:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._backward_()
        self._num_rounds += 1
        if self._graph is None:
            self._backward_()
        else:
            self._graph.replay()
        return self.rows

    def _backward_(self) -> None:
        each = zip(self._models, self._views, *self._examples, strict=True)
        for number, (model, views, inputs, targets) in enumerate(each):
            with self._beside(number):
                loss = F.cross_entropy(model(inputs), targets)
                torch._foreach_copy_(views, torch.autograd.grad(loss, list(model.parameters())))
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _beside(self, number: int) -> AbstractContextManager[Any]:
        if not self._streams:
            return nullcontext()
        stream = self._streams[number]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


class Votes:
    """Each worker's signs, and the majority's: `laconic.Session` under a server, on whole matrices."""

    def __init__(self, scheme: Scheme, layout: Layout, num_workers: int, device: torch.device) -> None:
        assert scheme.exchange.votes
        self._fade = scheme.memory.fade if scheme.memory.kinds else 0.0
        self._balance = torch.zeros(num_workers, layout.num_entries, device=device)
        plan = scheme.select.plan(layout, scheme.select.density_among(num_workers))
        assert plan.num_fixed in (0, layout.num_entries)
        of_size = defaultdict(list)
        for window in plan.windows:
            of_size[window.stop - window.start, window.k].append(window.start)
        self._windows = [
            (torch.tensor(starts, device=device)[:, None] + torch.arange(size, device=device), k)
            for (size, k), starts in of_size.items()
        ]

    def __call__(self, gradients: Tensor, step: int) -> Tensor:
        """The vote on every entry, in {-1, 0, 1}."""
        if not self._windows:
            num_entries = gradients.size(1)
            return torch.stack([take_sides(row, num_entries, step) for row in gradients]).sign().sum(0).sign()
        balance = self._balance.mul_(self._fade).add_(gradients)
        sums = torch.zeros_like(balance[0])
        for places, k in self._windows:
            inside = balance[:, places]  # [workers, windows, entries]
            largest = inside.abs().topk(k, sorted=False).indices
            selected = places.expand_as(inside).gather(2, largest).flatten(1)
            sums.index_add_(0, selected.flatten(), inside.gather(2, largest).sign().flatten())
            balance.scatter_(1, selected, 0.0)
        return sums.sign()


def curve(job: Job) -> list[dict[str, float]]:
    """Train, and say of every job.eval_every rounds what it came to."""
    data = job.load_data()
    device = torch.device(job.device)
    courses = [Course(job, data, rank, job.workers) for rank in range(job.workers)]
    torch.manual_seed(job.seed)
    model = courses[0].model(device)
    updater = courses[0].updater(model)
    named = dict(model.named_parameters())
    layout = Layout.of(list(named), [parameter.shape for parameter in named.values()])
    scheme = parse(job.scheme)
    assert isinstance(scheme, Scheme)
    votes = Votes(scheme, layout, job.workers, device)
    inputs, targets = courses[0].examples(0, device)
    room = [torch.stack([each] * job.workers) for each in (inputs, targets)]
    gradients = Gradients(model, layout, *room)
    points = []
    for step in range(courses[0].num_steps):
        vote = votes(gradients.take_([course.examples(step, device) for course in courses]), step)
        for parameter, span in zip(named.values(), layout.spans, strict=True):
            parameter.grad = vote[span.start : span.stop].view_as(parameter)
        updater.set_rate_(courses[0].rate(step))
        updater.apply_()
        if (step + 1) % job.eval_every == 0 or step + 1 == courses[0].num_steps:
            right, loss_sum, count = courses[0].score(model, device)
            points.append({"rounds": step + 1, "accuracy": 100 * right / count, "loss": loss_sum / count})
            print(f"{job.scheme}, seed {job.seed}: {points[-1]}", file=sys.stderr, flush=True)
    return points


def main() -> int:
    """Train under every scheme and seed, and print the rows of a record."""
    parser = argparse.ArgumentParser(prog="python tools/votes.py", description="Votes of many workers, round by round.")
    parser.add_argument("--scheme", action="append", help=f"may be repeated (default: {' and '.join(SCHEMES)})")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--task", default="cifar10")
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="folder of the images")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    given = {name: value for name, value in vars(args).items() if name not in ("scheme", "seeds", "processes")}
    schemes = args.scheme or SCHEMES
    seeds = [int(word) for word in args.seeds.split(",")]
    jobs = [Job(scheme=scheme, seed=seed, servers=1, **given) for scheme in schemes for seed in seeds]
    with ProcessPoolExecutor(args.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        curves = map(curve, jobs) if args.processes == 1 else pool.map(curve, jobs)
        for scheme in schemes:
            for points in zip(*(next(curves) for _ in seeds), strict=True):
                accuracies = [round(point["accuracy"], 2) for point in points]
                row = {"scheme": scheme, "rounds": points[0]["rounds"], "accuracy": round(mean(accuracies), 3)}
                loss = round(mean(point["loss"] for point in points), 4)
                print(json.dumps({**row, "accuracy by seed": accuracies, "loss": loss}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
