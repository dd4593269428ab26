"""Which outer momentum holds where H, delay, bits, workers, inner optimizer and learning rate differ: a simulation.

    python tools/outer_momentum.py choose FILE      # of text: all rules
    python tools/outer_momentum.py confirm FILE     # the fixed ones, and the one that was chosen

All workers' models lie in one tensor, so a step of all is one forward and backward pass. A small character GPT trains
apart; fragments of its drift are quantized with error feedback, averaged, put through the outer rule, and applied
`delay` steps later by adding what the anchor moved. The loss is the mean model's on held-out text.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS, WIDTH, HEADS, BLOCK = 2, 32, 2, 32
STEPS = 300
SEQUENCES = 32  # of all workers together at a step, so that equal steps are equal tokens
LR = 5e-3  # near the best for both optimizers


@dataclass(frozen=True)
class Job:
    """What is trained, and what crosses the network when."""

    every: int  # H
    delay: int
    bits: int  # 0: float32
    workers: int
    inner: str
    schedule: str
    lr_factor: float  # times the best

    def __str__(self) -> str:
        rate = f"{self.inner} x{self.lr_factor:.2g} {self.schedule}"
        return f"{rate}, H={self.every}, {self.delay} late, {self.bits or 32} bits, {self.workers} workers"


JOBS = {
    "choose": [
        Job(16, 4, 4, 4, "adamw", "cosine", 1.0),
        Job(4, 1, 4, 4, "adamw", "cosine", 1.0),
        Job(16, 4, 4, 4, "muon", "cosine", 1.0),
        Job(32, 0, 0, 8, "adamw", "constant", 1.0),
        Job(8, 0, 4, 4, "adamw", "cosine", 3.0),
        Job(64, 16, 2, 4, "muon", "cosine", 1 / 3),
    ],
    "confirm": [
        Job(2, 0, 4, 4, "adamw", "cosine", 1.0),
        Job(4, 1, 4, 8, "muon", "constant", 1.0),
        Job(64, 16, 4, 2, "adamw", "cosine", 1.0),
        Job(16, 4, 2, 16, "adamw", "cosine", 1 / 3),
        Job(32, 8, 2, 4, "muon", "cosine", 3.0),
        Job(8, 2, 0, 16, "muon", "cosine", 1.0),
        Job(16, 0, 4, 4, "adamw", "constant", 3.0),
    ],
}


# Outer learning rate and momentum, which with auto begins there.
RULES = {"0": (1.0, 0.0), "0.6": (0.7, 0.6), "0.9": (0.7, 0.9), "auto": (1.0, 0.0), "1 / 0.5": (1.0, 0.5)}
FIXED = ("0", "0.6", "0.9")


class Gpt:
    """A GPT whose parameters are rows of one float32 matrix: a row for each worker."""

    def __init__(self, vocabulary: int, workers: int) -> None:
        n, w = vocabulary, WIDTH
        shapes: dict[str, tuple[int, ...]] = {"wte": (n, w), "wpe": (BLOCK, w), "w1": (n, w), "w2": (n, w)}
        block = {"ln1": (w,), "qkv": (3 * w, w), "proj": (w, w), "ln2": (w,), "up": (4 * w, w), "down": (w, 4 * w)}
        for layer in range(LAYERS):
            shapes |= {f"{layer}.{name}": shape for name, shape in block.items()}
        self.shapes = shapes = {**shapes, "lnf": (w,), "head": (n, w)}
        cuts = [0]
        for shape in shapes.values():
            cuts.append(cuts[-1] + math.prod(shape))
        self.spans = {name: slice(a, b) for name, (a, b) in zip(shapes, pairwise(cuts), strict=True)}
        draw = torch.Generator().manual_seed(0)
        row, self.decays = torch.ones(cuts[-1]), torch.zeros(cuts[-1])
        for name, shape in shapes.items():
            if len(shape) == 2:
                std = 0.02 / math.sqrt(2 * LAYERS) if name.endswith(("proj", "down")) else 0.02
                row[self.spans[name]] = torch.randn(math.prod(shape), generator=draw) * std
                self.decays[self.spans[name]] = 1.0
        self.flat = row.repeat(workers, 1)
        self.grad = torch.zeros_like(self.flat)
        self.p: dict[str, Tensor] = self.views(self.flat)
        for name, grad in self.views(self.grad).items():
            self.p[name].requires_grad_().grad = grad

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters of all rows, by name."""
        return {name: flat[:, span].view(-1, *self.shapes[name]) for name, span in self.spans.items()}

    def loss(self, x: Tensor, y: Tensor, p: dict[str, Tensor]) -> Tensor:
        """The sum over workers of each one's mean loss; x is [workers, sequences, BLOCK]."""
        workers, sequences, length = x.shape
        rows = p["wte"].size(1) * torch.arange(workers)[:, None, None]
        h = F.embedding(x + rows, p["wte"].reshape(-1, WIDTH)).flatten(1, 2)
        h = h + p["wpe"][:, :length].repeat(1, sequences, 1)
        for back in (1, 2):  # the characters before, which spare attention the plateau of its first steps
            h = h + F.embedding(x.roll(back, 2) + rows, p[f"w{back}"].reshape(-1, WIDTH)).flatten(1, 2)
        for layer in range(LAYERS):
            a = F.layer_norm(h, (WIDTH,)) * p[f"{layer}.ln1"][:, None]
            qkv = torch.bmm(a, p[f"{layer}.qkv"].mT)
            q, k, v = qkv.view(workers * sequences, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + torch.bmm(mixed.transpose(1, 2).reshape(workers, -1, WIDTH), p[f"{layer}.proj"].mT)
            a = F.layer_norm(h, (WIDTH,)) * p[f"{layer}.ln2"][:, None]
            h = h + torch.bmm(F.gelu(torch.bmm(a, p[f"{layer}.up"].mT)), p[f"{layer}.down"].mT)
        logits = torch.bmm(F.layer_norm(h, (WIDTH,)) * p["lnf"][:, None], p["head"].mT)
        return F.cross_entropy(logits.flatten(0, 1), y.reshape(-1)) * workers


class Inner:
    """AdamW, or Muon on the blocks' matrices at four times the rate and AdamW on the rest, on all rows at once."""

    def __init__(self, model: Gpt, kind: str) -> None:
        self.model = model
        self.m, self.v = torch.zeros_like(model.flat), torch.zeros_like(model.flat)
        self.step = 0
        matrices = [n for n in model.shapes if n.endswith(("qkv", "proj", "up", "down"))] if kind == "muon" else []
        self.momentum = {name: torch.zeros_like(model.p[name]) for name in matrices}

    @torch.no_grad()
    def step_(self, lr: float) -> None:
        """One step by the gradient."""
        model = self.model
        self.step += 1
        before = {name: model.p[name].clone() for name in self.momentum}
        self.m.lerp_(model.grad, 0.1)
        self.v.lerp_(model.grad.square(), 0.05)
        root = (self.v / (1 - 0.95**self.step)).sqrt_().add_(1e-8)
        model.flat.mul_(1 - lr * 0.1 * model.decays)
        model.flat.addcdiv_(self.m, root, value=-lr / (1 - 0.9**self.step))
        for name, m in self.momentum.items():
            grad = model.grad[:, model.spans[name]].view_as(m)
            m.mul_(0.95).add_(grad)
            scale = 4 * lr * 0.2 * math.sqrt(max(model.shapes[name]))
            model.p[name].copy_(before[name] * (1 - 4 * lr * 0.1) - scale * orthogonal(grad.add(m, alpha=0.95)))


def orthogonal(x: Tensor) -> Tensor:
    """Newton-Schulz, five steps."""
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Outer:
    """Anchors of all fragments, and how each moves."""

    def __init__(self, model: Gpt, job: Job, rule: str) -> None:
        self.model, self.job, self.is_auto = model, job, rule == "auto"
        self.lr, momentum = RULES[rule]
        n = model.flat.size(1)
        self.fragments = min(4, job.every)
        cuts = [n * i // self.fragments for i in range(self.fragments + 1)]
        self.slices = [slice(a, b) for a, b in pairwise(cuts)]
        self.anchor, self.buffer = model.flat[0].clone(), torch.zeros(n)
        self.residual = torch.zeros_like(model.flat)
        self.mu = [momentum] * self.fragments
        self.past: list[list[Tensor]] = [[] for _ in self.slices]  # the last outer steps
        beta = 0.95 if job.inner == "muon" else 0.9
        self.lag = max(1, math.ceil(2.5 / (1 - beta) / job.every))
        self.gain = 0.5 * min(1.0, job.every / 16)
        self.pending: list[tuple[int, int, Tensor, Tensor]] = []

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Apply the results that are due after a step, and send the fragments whose round it is."""
        self.apply_due(step)
        place = (step - 1) % self.job.every + 1
        for number, inside in enumerate(self.slices):
            if (number + 1) * self.job.every // self.fragments == place:
                now = self.model.flat[:, inside].clone()
                drift = self.anchor[inside] - now
                sent = quantized(drift + self.residual[:, inside], self.job.bits)
                if self.job.bits:
                    self.residual[:, inside] += drift - sent
                self.pending.append((step + self.job.delay, number, sent.mean(0), now))
        self.apply_due(step)

    def apply_due(self, step: int) -> None:
        while self.pending and self.pending[0][0] <= step:
            _, number, mean, sent = self.pending.pop(0)
            inside = self.slices[number]
            self.anchor[inside] -= self.outer_step(number, mean)
            self.model.flat[:, inside] += self.anchor[inside] - sent

    def outer_step(self, number: int, mean: Tensor) -> Tensor:
        buffer, past = self.buffer[self.slices[number]], self.past[number]
        if self.is_auto and len(past) >= self.lag:
            q = float(torch.dot(mean, past[0]) / (mean.norm() * past[0].norm() + 1e-30))
            self.mu[number] = min(0.9, max(0.0, self.mu[number] + self.gain * (q - 0.05)))
        mu = self.mu[number]
        buffer.mul_(mu).add_(mean)
        applied = self.lr * (mean + mu * buffer) if mu else self.lr * mean
        self.past[number] = [*past, applied][-self.lag :]
        return applied


def quantized(x: Tensor, bits: int) -> Tensor:
    """Per 512 entries: unbiased on a grid of 2^(bits-1)-1 levels a side; in two bits the nearest of {-b, -a, a, b}."""
    if not bits:
        return x
    blocks = F.pad(x, (0, -x.size(1) % 512)).view(x.size(0), -1, 512)
    size = blocks.abs()
    if bits == 2:
        is_large = size > size.mean(2, keepdim=True)
        means = [(size * m).sum(2, True) / m.sum(2, True).clamp_min(1) for m in (is_large, ~is_large)]
        values = torch.where(is_large, means[0], means[1]).copysign(blocks)
    else:
        unit = size.amax(2, keepdim=True).clamp_min(1e-30) / (2 ** (bits - 1) - 1)
        values = torch.floor(blocks / unit + torch.rand_like(blocks)) * unit
    return values.view(x.size(0), -1)[:, : x.size(1)]


def rate(job: Job, step: int) -> float:
    """The inner learning rate: a short warm-up, then a cosine to a tenth, or constant."""
    best = LR * job.lr_factor * (0.4 if job.schedule == "constant" else 1.0)
    if step < 20:
        return best * (step + 1) / 20
    share = (step - 20) / (STEPS - 20)
    return best if job.schedule == "constant" else best * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def train(job: Job, rule: str, text: Tensor, vocabulary: int) -> float:
    """Validation loss of the mean model at the end."""
    torch.manual_seed(0)
    split = int(0.9 * len(text))
    model = Gpt(vocabulary, job.workers)
    inner, outer = Inner(model, job.inner), Outer(model, job, rule)
    draw = torch.Generator().manual_seed(1000)
    window = torch.arange(BLOCK + 1)
    for step in range(STEPS):
        at = torch.randint(split - BLOCK - 1, (SEQUENCES,), generator=draw)
        chunk = text[at[:, None] + window].view(job.workers, -1, BLOCK + 1)
        model.grad.zero_()
        model.loss(chunk[..., :-1], chunk[..., 1:], model.p).backward()  # type: ignore[no-untyped-call]
        model.grad.mul_((1.0 / (model.grad.norm(dim=1, keepdim=True) + 1e-6)).clamp_max_(1.0))  # as scripts clip
        inner.step_(rate(job, step))
        outer.after(step + 1)
    with torch.no_grad():
        p = model.views(model.flat.mean(0, keepdim=True))
        at = torch.arange(split, len(text) - BLOCK - 1, (len(text) - split - BLOCK - 2) // 256)
        chunks = [text[some[:, None] + window][None] for some in torch.split(at, 64)]
        return mean(float(model.loss(chunk[..., :-1], chunk[..., 1:], p)) for chunk in chunks)


def rows_of(losses: dict[str, dict[str, float]], part: str) -> list[dict[str, Any]]:
    """Rows of a record: each job's loss by rule, and how far every rule is behind the best fixed one of each job."""
    rows: list[dict[str, Any]] = []
    behind = defaultdict(list)
    for job, by_rule in losses.items():
        rows.append({"job": job, "part": part, **{rule: f"{loss:.4f}" for rule, loss in by_rule.items()}})
        for rule, loss in by_rule.items():
            behind[rule].append(100 * (loss / min(by_rule[fixed] for fixed in FIXED) - 1))
    for title, over in (("mean", mean), ("worst", max)):
        percents = {rule: f"{over(values):+.2f} %" for rule, values in behind.items()}
        rows.append({"job": f"{title}, beside the best of 0, 0.6 and 0.9", "part": part, **percents})
    return rows


def main() -> None:
    """Train all jobs of a part under all rules, and print the rows of a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=JOBS)
    parser.add_argument("text", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    raw = args.text.read_text()
    letters = sorted(set(raw))
    text = torch.tensor([letters.index(c) for c in raw])
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    for job in JOBS[args.part]:
        for name in RULES if args.part == "choose" else (*FIXED, "auto"):
            losses[str(job)][name] = train(job, name, text, len(letters))
    print(json.dumps(rows_of(losses, args.part)))


if __name__ == "__main__":
    main()
