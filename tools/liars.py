"""Members that lie: the loss that each rule of `laconic serve --combine` reaches, beside runs without liars.

    python tools/liars.py train FILE [--jobs gpt cnn] [--sizes 1/4 2/8 3/9] [--seeds 0 1 2] [--rules clipped median]
    python tools/liars.py time [--entries 4000000] [--members 8]

FILE is a text for the job gpt: a character GPT-2 of 30 k parameters whose drifts go as `streaming` writes them; cnn is
a convolutional net of 23 k on Fashion-MNIST at half its size, whose drifts are sparse (`sparseloco`): both so small
that hundreds of runs fit a processor. Honest members train apart on batches of their own, with --unlike on labels (or
a part of the text) of their own. Liars know all honest drifts of a round; they send

    flip       -10 times the mean                       zero       zeros
    noise      normal, ten times the size               duplicate  the drift of one honest member
    alie       mean - 1.5 deviations, entry by entry    minmax     mean - g * mean/|mean|, with the largest g that is no
                                                                   farther from anybody than two honest ones are
    minmax+    and alie+: the same by liars who know that `clipped` counts equal lies once: each adds noise of its own,
               so large that two lies are 0.6 times as far apart as honest drifts are

Models of all runs of a seed are rows of one matrix and train at once. A line of JSON for each run: the loss on held-out
data of the last anchor. `time` measures rounds of a server, from their messages to the update, by rule, in one
thread's time on the processor, in which what else a machine does is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from laconic import parse
from laconic.layout import Layout
from laconic.members.codec import codec_for
from laconic.members.combine import Combine
from laconic.members.messages import Anchor, Drift, Join, Request
from laconic.members.replica import check_elastic
from laconic.members.syncer import Syncer, fingerprint_of, stated_layouts
from laconic_lab.tasks import TASKS
from laconic_lab.tasks.models import GPT2

ATTACKS = ("flip", "noise", "alie", "minmax", "zero", "duplicate")
ADAPTED = ("minmax+", "alie+")
RULES = ("clipped", "median", "trimmed", "clipped+near", "median+near", "trimmed+near")
SIZES = {"1/4": (1, 4), "2/8": (2, 8), "3/9": (3, 9)}
EVERY = 16
SCHEMES = {
    "gpt": f"streaming:every={EVERY},fragments=1,delay=0,lr=0.7,momentum=0.6",
    "cnn": f"sparseloco:every={EVERY},rho=0.1",
}
LR, WARM_UP = 1e-3, 20


class Unfolded(nn.Module):
    """A 3x3 convolution as a product of matrices, so that many models' are one batch of those."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.inner = nn.Linear(9 * channels_in, channels)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2] - 2, x.shape[3] - 2
        return self.inner(F.unfold(x, 3).mT).mT.unflatten(2, (height, width))  # type: ignore[no-any-return]


def small_cnn() -> nn.Module:
    """Two convolutions of halved images and two linear layers: 22,602 parameters."""
    first = (nn.AvgPool2d(2), Unfolded(1, 16), nn.ReLU(), nn.MaxPool2d(2), Unfolded(16, 32), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


@dataclass
class Run:
    """A run: what the server does, how its liars lie, and its honest members' rows."""

    rule: str
    attack: str
    num_liars: int
    rows: slice


class Population:
    """The models of all runs of one job, size and seed, as rows of one matrix."""

    def __init__(
        self, job: str, text: Path, seed: int, device: torch.device, batch: int, is_unlike: bool = False
    ) -> None:
        task = TASKS["chars" if job == "gpt" else "fashion-mnist"]
        self.data = task.load(text if job == "gpt" else None, 32)
        self.batch = batch
        self.is_unlike = is_unlike
        labels = self.data.train_targets
        self.order = labels.argsort(stable=True) if labels.dim() == 1 else torch.arange(len(labels))
        self.device = device
        self.scheme = check_elastic(parse(SCHEMES[job]))
        torch.manual_seed(seed)
        self.model = (GPT2(self.data.vocabulary, 32, 32, 2, 2) if job == "gpt" else small_cnn()).to(device)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        cuts = [0]
        for shape in self.shapes.values():
            cuts.append(cuts[-1] + math.prod(shape))
        self.spans = {name: slice(a, b) for name, (a, b) in zip(self.shapes, pairwise(cuts), strict=True)}
        self.first = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).cpu()
        self.draw = torch.Generator().manual_seed(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.seed = seed

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Parameters of all rows, by name."""
        return {name: flat[:, span].view(-1, *self.shapes[name]) for name, span in self.spans.items()}

    def losses(self, views: dict[str, Tensor], x: Tensor, y: Tensor, dim: int | None) -> Tensor:
        """The mean loss of each row."""

        def loss(p: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            scores = functional_call(self.model, p, (inputs,))
            return F.cross_entropy(scores.flatten(0, -2), targets.reshape(-1))

        with sdpa_kernel(SDPBackend.MATH):  # the others are not batched over models
            return vmap(loss, (0, dim, dim))(views, x, y)

    def drawn(self, num_members: int) -> Tensor:
        """Examples of a step for each member: of all, or of its part of them in the order of their labels."""
        if not self.is_unlike:
            return torch.randint(len(self.order), (num_members, self.batch), generator=self.draw)
        part = len(self.order) // num_members
        inside = torch.randint(part, (num_members, self.batch), generator=self.draw)
        return self.order[inside + part * torch.arange(num_members)[:, None]]

    def train(self, runs: list[Run], members: list[int], steps: int) -> list[float]:
        """The loss of each run's last anchor on held-out data; `members` says whose batches each row takes."""
        flat = self.first.to(self.device).repeat(len(members), 1)
        grad = torch.zeros_like(flat)
        p = self.views(flat)
        for name, view in self.views(grad).items():
            p[name].requires_grad_().grad = view
        m, v = torch.zeros_like(flat), torch.zeros_like(flat)
        servers = [Server(self, run) for run in runs]
        for step in range(1, steps + 1):
            at = self.drawn(max(members) + 1)[members]
            x = self.data.prepare(self.data.train_inputs[at].to(self.device))
            y = self.data.train_targets[at].to(self.device)
            grad.zero_()
            self.losses(p, x, y, 0).sum().backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                grad.mul_((1 / (grad.norm(dim=1, keepdim=True) + 1e-6)).clamp_max_(1))
                m.lerp_(grad, 0.1)
                v.lerp_(grad.square(), 0.05)
                share = max(0.0, step - WARM_UP) / (steps - WARM_UP)
                lr = LR * min(1, step / WARM_UP) * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
                root = (v / (1 - 0.95**step)).sqrt_().add_(1e-8)
                flat.addcdiv_(m, root, value=-lr / (1 - 0.9**step))
                for server in servers:
                    server.after_step_(flat[server.run.rows], step)
        anchors = torch.stack([server.anchor for server in servers]).to(self.device)
        held_out = list(range(0, len(self.data.test_inputs), 64))[:8]
        parts = []
        with torch.no_grad():
            for start in held_out:
                x = self.data.prepare(self.data.test_inputs[start : start + 64].to(self.device))
                y = self.data.test_targets[start : start + 64].to(self.device)
                parts.append(self.losses(self.views(anchors), x, y, None))
        return [float(loss) for loss in torch.stack(parts).mean(0)]


class Server:
    """A run's anchor, its honest members' residuals, its liars, and its outer steps, all on the CPU."""

    def __init__(self, population: Population, run: Run) -> None:
        self.run = run
        self.population = population
        self.anchor = population.first.clone()
        scheme = population.scheme
        num_entries, fragments = self.anchor.numel(), scheme.when.fragments
        self.slices = [
            slice(num_entries * i // fragments, num_entries * (i + 1) // fragments) for i in range(fragments)
        ]
        self.codecs = [codec_for(scheme.exchanged, Layout.of(["w"], [s.stop - s.start])) for s in self.slices]
        self.residual = torch.zeros(run.rows.stop - run.rows.start, num_entries)
        self.steps = [torch.zeros_like(self.anchor[inside]) for inside in self.slices]
        self.optimizers = [scheme.then.optimizer([step]) for step in self.steps]

    def after_step_(self, models: Tensor, number: int) -> None:
        """Take the outer steps that are due after a step; members continue from the anchor."""
        scheme = self.population.scheme
        for fragment in scheme.when.fragments_due(number):
            inside, codec = self.slices[fragment], self.codecs[fragment]
            fade = scheme.exchanged.memory.fade
            owed = self.anchor[inside] - models[:, inside].cpu() + fade * self.residual[:, inside]
            key = (self.population.seed, fragment, number)
            rows = torch.stack([codec.encode(row.clone(), (*key, i))[1] for i, row in enumerate(owed)])
            self.residual[:, inside] = owed - rows
            if self.run.num_liars:
                lies = lies_of(self.run.attack, rows, self.run.num_liars, self.population.noise)
                lies = torch.stack([codec.encode_all(row.clone(), (*key, 99 + i))[1] for i, row in enumerate(lies)])
                rows = torch.cat([rows, lies])
            drift = rows.mean(0)
            if self.run.rule != "mean":
                drift = Combine.parse(self.run.rule)(rows, [1] * len(rows), f"{fragment}/{number}").drift
            self.steps[fragment].zero_().grad = drift
            self.optimizers[fragment].step()
            self.anchor[inside] += self.steps[fragment]
            models[:, inside] = self.anchor[inside].to(models.device)


def lies_of(attack: str, honest: Tensor, num_liars: int, noise: torch.Generator) -> Tensor:
    """What liars send who know all honest drifts, and with "+" the rule, too."""
    if attack in ADAPTED:
        apart = F.pdist(honest).median() if len(honest) > 1 else 0.0
        drawn = torch.randn(num_liars, honest.shape[1], device=honest.device, generator=noise)
        own = drawn * (0.6 * 0.5**0.5 * apart / drawn.norm(dim=1, keepdim=True))
        adapted: Tensor = lies_of(attack.removesuffix("+"), honest, num_liars, noise) + own
        return adapted
    mean = honest.mean(0)
    if attack == "noise":
        drawn = torch.randn(num_liars, mean.numel(), device=mean.device, generator=noise)
        noises: Tensor = drawn * 10 * honest.square().mean().sqrt()
        return noises
    if attack == "minmax":
        away = -mean / mean.norm().clamp(min=1e-30)
        from_mean = honest - mean
        farthest = torch.cdist(honest, honest).max().square()
        along = from_mean @ away
        room = (along + (along.square() + farthest - from_mean.square().sum(1)).clamp(min=0).sqrt()).min()
        lie: Tensor = mean + room * away
    else:
        alie = mean - 1.5 * honest.std(0) if len(honest) > 1 else mean
        lie = {"flip": -10 * mean, "alie": alie, "zero": torch.zeros_like(mean), "duplicate": honest[0]}[attack]
    return lie.repeat(num_liars, 1)


def runs_of(size: str, rules: Sequence[str], attacks: Sequence[str]) -> tuple[list[Run], list[int]]:
    """The runs of a size, and the member whose batches each row of their population takes."""
    num_liars, n = SIZES[size]
    runs: list[Run] = []
    members: list[int] = []

    def add(rule: str, attack: str, num_honest: int) -> None:
        runs.append(Run(rule, attack, n - num_honest if attack else 0, slice(len(members), len(members) + num_honest)))
        members.extend(range(num_honest))

    add("mean", "", n)
    add("mean", "", n - num_liars)
    add("mean", "flip", n - num_liars)
    for rule in rules:
        add(rule, "", n)
        for attack in attacks:
            add(rule, attack, n - num_liars)
    return runs, members


def train(given: argparse.Namespace) -> None:
    """Print a line for each run; `behind` is in percent of the loss of the mean of as many honest members."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for seed in given.seeds:
        for job in given.jobs:
            for size in given.sizes:
                since = time.monotonic()
                runs, members = runs_of(size, given.rules, given.attacks)
                population = Population(job, given.text, seed, device, given.batch, given.unlike)
                losses = population.train(runs, members, given.steps)
                for run, loss in zip(runs, losses, strict=True):
                    line = {"job": job, "size": size, "seed": seed, "rule": run.rule, "attack": run.attack or "none"}
                    line |= {"honest": run.rows.stop - run.rows.start, "loss": round(loss, 5)}
                    line["behind"] = round(100 * (loss / losses[0] - 1), 3)
                    line["behind_absent"] = round(100 * (loss / losses[1] - 1), 3)  # liars who stay away instead
                    print(json.dumps(line), flush=True)
                print(
                    json.dumps({"job": job, "size": size, "seed": seed, "s": round(time.monotonic() - since, 1)}),
                    flush=True,
                )


def measure(given: argparse.Namespace) -> None:
    """Print a processor's seconds that a server takes for a round, from the last drift to the update, by rule."""
    torch.set_num_threads(1)
    layouts = {0: Layout.of(["w"], [given.entries])}
    torch.manual_seed(0)
    common = torch.randn(given.entries)
    for scheme in ("streaming:every=16,fragments=1", "diloco:every=16", "sparseloco:every=16"):
        codec = codec_for(check_elastic(parse(scheme)).exchanged, layouts[0])
        payloads = [codec.encode((common + torch.randn(given.entries)) * 1e-3, (i,))[0] for i in range(given.members)]
        servers = {rule: _server(scheme, rule, layouts, given.members) for rule in ("mean", *given.rules)}
        seconds: dict[str, list[float]] = {rule: [] for rule in servers}
        for version in range(given.rounds + 1):
            for rule, server in servers.items():  # in turns, so that a busy machine is busy for all
                for i, payload in enumerate(payloads):
                    since = time.process_time()
                    server.on_drift(f"m{i}", Drift(0, version, i, 100, 16, 0.0, {}, payload), 0.0)
                seconds[rule].append(time.process_time() - since)
        medians = {rule: statistics.median(each[1:]) for rule, each in seconds.items()}
        for rule, median in medians.items():
            times = round(median / medians["mean"], 3)
            print(
                json.dumps({"scheme": scheme, "rule": rule, "ms": round(1e3 * median, 2), "times_mean": times}),
                flush=True,
            )


def _server(scheme: str, rule: str, layouts: dict[int, Layout], num_members: int) -> Syncer:
    """A founded server in lockstep, with members that have the anchor."""
    syncer = Syncer(check_elastic(parse(scheme)), is_lockstep=True, combine=rule)
    for i in range(num_members):
        syncer.on_join(i, Join(f"m{i}", i, fingerprint_of(layouts), 0.9, stated_layouts(layouts)), 0.0)
    syncer.on_anchor("m0", Anchor.of(0, 0, torch.zeros(layouts[0].num_entries)))
    for i in range(num_members):
        syncer.on_request(f"m{i}", Request(0, 0, -1))
    return syncer


def main() -> None:
    """Do what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    trains = commands.add_parser("train")
    trains.add_argument("text", type=Path)
    trains.add_argument("--jobs", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    trains.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    trains.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    trains.add_argument("--rules", nargs="+", default=RULES)
    trains.add_argument("--attacks", nargs="*", choices=(*ATTACKS, *ADAPTED), default=(*ATTACKS, *ADAPTED))
    trains.add_argument("--unlike", action="store_true")
    trains.add_argument("--steps", type=int, default=240)
    trains.add_argument("--batch", type=int, default=4)
    trains.set_defaults(run=train)
    times = commands.add_parser("time")
    times.add_argument("--entries", type=int, default=4_000_000)
    times.add_argument("--members", type=int, default=8)
    times.add_argument("--rounds", type=int, default=9)
    times.add_argument("--rules", nargs="+", default=RULES)
    times.set_defaults(run=measure)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
