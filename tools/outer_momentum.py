"""Which outer momentum holds where H, delay, code, workers, inner optimizer and learning rate differ: a simulation.

    python tools/outer_momentum.py choose FILE --out cells.jsonl [--device cuda]     # of text
    python tools/outer_momentum.py confirm FILE --out cells.jsonl [--device cuda]    # other networks, other seeds
    python tools/outer_momentum.py again FILE --out cells.jsonl --rules "0;0.6;0.9;auto"    # and others once more
    python tools/outer_momentum.py fragments FILE --out cells.jsonl --rules auto     # networks, under one rule
    python tools/outer_momentum.py rows cells.jsonl ...                              # the rows of a record

All cells that share H, delay, code and number of workers lie in one tensor, a row for each worker of each: a step of
all is one forward and backward pass. A small character GPT trains apart; fragments of its drift are coded with error
feedback, averaged, put through the outer rule, and applied `delay` steps later by adding what the anchor moved. The
loss is the mean model's on held-out text.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS, WIDTH, HEADS, BLOCK = 2, 32, 2, 32
STEPS = 512
SEQUENCES = 32  # of all workers together at a step, so that equal steps are equal tokens
LR = 5e-3  # near the best for both optimizers
SPARSE = 0.05  # the share of entries that the code "sparse" sends
WHOLE_AT = 16.0  # steps of a round, from which on it counts whole


@dataclass(frozen=True)
class Network:
    """What crosses the network, when, and among how many."""

    every: int  # H
    delay: int
    code: str  # bits of an entry, or "sparse"
    workers: int
    fragments: int = 4

    def __str__(self) -> str:
        code = "sparse" if self.code == "sparse" else f"{self.code} bits"
        return f"H={self.every} in {self.fragments}, {self.delay} late, {code}, {self.workers} workers"


NETWORKS = {  # choose and confirm were split before any was run; again and fragments were run later
    "choose": [
        Network(2, 0, "4", 4),
        Network(4, 1, "4", 8),
        Network(8, 0, "16", 4),
        Network(16, 4, "4", 4),
        Network(16, 0, "2", 16),
        Network(16, 4, "sparse", 4),
        Network(32, 8, "2", 4),
        Network(32, 0, "8", 2),
        Network(64, 16, "4", 8),
        Network(128, 0, "4", 4),
    ],
    "confirm": [
        Network(2, 0, "16", 8),
        Network(4, 0, "4", 2),
        Network(8, 2, "4", 4),
        Network(8, 2, "2", 16),
        Network(16, 4, "4", 2),
        Network(16, 4, "2", 8),
        Network(16, 0, "16", 4),
        Network(32, 8, "4", 4),
        Network(32, 8, "sparse", 8),
        Network(64, 0, "2", 4),
        Network(64, 16, "4", 16),
        Network(128, 32, "4", 4),
    ],
    "again": [
        Network(3, 0, "4", 4),
        Network(6, 1, "4", 8),
        Network(12, 3, "4", 4),
        Network(16, 2, "4", 8),
        Network(24, 6, "2", 4),
        Network(24, 0, "sparse", 4),
        Network(48, 12, "4", 8),
        Network(96, 0, "4", 2),
    ],
    "fragments": [Network(16, 4, "4", 4), Network(16, 2, "4", 4), Network(16, 2, "4", 4, fragments=8)],
}
SEEDS = {"choose": (0, 1, 2), "confirm": (5, 6, 7), "again": (8, 9, 10), "fragments": (20, 21, 22)}


@dataclass(frozen=True)
class Rule:
    """An outer step; with a gain its momentum goes up and down with agreement."""

    lr: float = 1.0
    start: float = 0.0  # of the momentum; with a gain, times min(1, H/16)
    gain: float = 0.0  # 0: the momentum stays
    aim: float = 0.05
    memories: float = 2.5  # of the inner optimizer, which the lag outlasts
    most: float = 0.9


AUTO = Rule(gain=0.5, most=0.7)
RULES = {
    "0": Rule(),
    "0.6": Rule(lr=0.7, start=0.6),
    "0.9": Rule(lr=0.7, start=0.9),
    "auto": AUTO,
    "auto, up to 0.8": replace(AUTO, most=0.8),
    "auto, from 0.2": replace(AUTO, start=0.2),
    "auto, from 0.3": replace(AUTO, start=0.3),
}
FIXED = ("0", "0.6", "0.9")


@dataclass(frozen=True)
class Cell:
    """One run, whatever its network."""

    inner: str
    schedule: str
    lr_factor: float  # times the best
    seed: int
    rule: str


def cells_of(rules: Iterable[str], seeds: Sequence[int]) -> list[Cell]:
    """All of them; those of Muon come last, since it steps matrices of a contiguous half."""
    schedules = (("cosine", 1 / 3), ("cosine", 1.0), ("cosine", 3.0), ("constant", 1.0))
    kinds = product(("adamw", "muon"), schedules, seeds, rules)
    return [Cell(inner, *schedule, seed, rule) for inner, schedule, seed, rule in kinds]


class Gpts:
    """GPTs whose parameters are rows of one float32 matrix: a row for each worker of each cell."""

    def __init__(self, vocabulary: int, cells: Sequence[Cell], workers: int, device: torch.device) -> None:
        self.vocabulary = n = vocabulary
        w = WIDTH
        shapes: dict[str, tuple[int, ...]] = {"wte": (3 * n, w), "wpe": (BLOCK, w)}  # of three letters, one after one
        block = {"ln1": (w,), "qkv": (3 * w, w), "proj": (w, w), "ln2": (w,), "up": (4 * w, w), "down": (w, 4 * w)}
        for layer in range(LAYERS):
            shapes |= {f"{layer}.{name}": shape for name, shape in block.items()}
        self.shapes = shapes = {**shapes, "lnf": (w,), "head": (n, w)}
        cuts = [0]
        for shape in shapes.values():
            cuts.append(cuts[-1] + math.prod(shape))
        self.spans = {name: slice(a, b) for name, (a, b) in zip(shapes, pairwise(cuts), strict=True)}
        first = {seed: self._first(seed, cuts[-1]) for seed in sorted({cell.seed for cell in cells})}
        self.decays = torch.zeros(cuts[-1], device=device)
        for name, shape in shapes.items():
            self.decays[self.spans[name]] = float(len(shape) == 2)
        self.flat = torch.stack([first[cell.seed] for cell in cells]).repeat_interleave(workers, 0).to(device)
        self.grad = torch.zeros_like(self.flat)
        self.p: dict[str, Tensor] = self.views(self.flat)
        for name, grad in self.views(self.grad).items():
            self.p[name].requires_grad_().grad = grad

    def _first(self, seed: int, num_entries: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        row = torch.ones(num_entries)
        for name, shape in self.shapes.items():
            if len(shape) == 2:
                std = 0.02 / math.sqrt(2 * LAYERS) if name.endswith(("proj", "down")) else 0.02
                row[self.spans[name]] = torch.randn(math.prod(shape), generator=draw) * std
        return row

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters of all rows, by name."""
        return {name: flat[:, span].view(-1, *self.shapes[name]) for name, span in self.spans.items()}

    def losses(self, x: Tensor, y: Tensor, p: dict[str, Tensor]) -> Tensor:
        """Each row's mean loss; x is [rows, sequences, BLOCK]."""
        rows, sequences, length = x.shape
        # The letters before spare attention the plateau of its first steps.
        letters = torch.stack([x.roll(back, 2) + back * self.vocabulary for back in (0, 1, 2)], 3).flatten(1, 2)
        one_hot = p["wte"].new_zeros(*letters.shape[:2], 3 * self.vocabulary).scatter_(2, letters, 1.0)
        h = torch.bmm(one_hot, p["wte"])
        h = h + p["wpe"][:, :length].repeat(1, sequences, 1)
        for layer in range(LAYERS):
            a = F.layer_norm(h, (WIDTH,)) * p[f"{layer}.ln1"][:, None]
            qkv = torch.bmm(a, p[f"{layer}.qkv"].mT)
            q, k, v = qkv.view(rows * sequences, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + torch.bmm(mixed.transpose(1, 2).reshape(rows, -1, WIDTH), p[f"{layer}.proj"].mT)
            a = F.layer_norm(h, (WIDTH,)) * p[f"{layer}.ln2"][:, None]
            h = h + torch.bmm(F.gelu(torch.bmm(a, p[f"{layer}.up"].mT)), p[f"{layer}.down"].mT)
        logits = torch.bmm(F.layer_norm(h, (WIDTH,)) * p["lnf"][:, None], p["head"].mT)
        return F.cross_entropy(logits.flatten(0, 1), y.reshape(-1), reduction="none").view(rows, -1).mean(1)


class Inner:
    """AdamW, or Muon on the blocks' matrices at four times the rate and AdamW on the rest, on all rows at once."""

    def __init__(self, model: Gpts, first_muon: int) -> None:
        self.model = model
        self.m, self.v = torch.zeros_like(model.flat), torch.zeros_like(model.flat)
        self.step = 0
        self.rows = slice(first_muon, None)
        matrices = [n for n in model.shapes if n.endswith(("qkv", "proj", "up", "down"))]
        self.momentum = {name: torch.zeros_like(model.p[name][self.rows]) for name in matrices}

    @torch.no_grad()
    def step_(self, lr: Tensor) -> None:
        """One step by the gradient; lr is of each row."""
        model, rows = self.model, self.rows
        self.step += 1
        before = {name: model.p[name][rows].clone() for name in self.momentum}
        self.m.lerp_(model.grad, 0.1)
        self.v.mul_(0.95).addcmul_(model.grad, model.grad, value=0.05)
        root = (self.v / (1 - 0.95**self.step)).sqrt_().add_(1e-8)
        model.flat.mul_(1 - lr * 0.1 * model.decays)
        model.flat.sub_((self.m / root).mul_(lr / (1 - 0.9**self.step)))
        lr = 4 * lr[rows, :, None]
        for name, m in self.momentum.items():
            grad = model.grad[rows, model.spans[name]].view_as(m)
            m.mul_(0.95).add_(grad)
            scale = lr * 0.2 * math.sqrt(max(model.shapes[name]))
            update = scale * orthogonal(grad.add(m, alpha=0.95))
            model.p[name][rows].copy_(before[name] * (1 - lr * 0.1) - update)


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
    """Anchors of all cells and fragments, and how each moves."""

    def __init__(self, model: Gpts, network: Network, cells: Sequence[Cell]) -> None:
        self.network = network
        n, device = model.flat.size(1), model.flat.device
        self.flat = model.flat.view(len(cells), network.workers, n)
        self.fragments = min(network.fragments, network.every)
        cuts = [n * i // self.fragments for i in range(self.fragments + 1)]
        self.slices = [slice(a, b) for a, b in pairwise(cuts)]
        self.anchor = self.flat[:, 0].clone()
        self.buffer, self.residual = torch.zeros_like(self.anchor), torch.zeros_like(self.flat)
        rules = [RULES[cell.rule] for cell in cells]
        self.of = {name: torch.tensor([asdict(rule)[name] for rule in rules], device=device) for name in asdict(AUTO)}
        weight = min(1.0, network.every / WHOLE_AT)
        self.gain = weight * self.of["gain"]
        self.mu = [self.of["start"] * torch.where(self.gain > 0, weight, 1.0) for _ in self.slices]
        self.q = [self.of["aim"].clone() for _ in self.slices]
        self.past: list[list[Tensor]] = [[] for _ in self.slices]  # the last outer steps
        betas = [0.95 if cell.inner == "muon" else 0.9 for cell in cells]
        each = zip(rules, betas, strict=True)
        lags = [max(1, math.ceil(rule.memories / (1 - beta) / network.every - 1e-9)) for rule, beta in each]
        self.at_lag = {lag: torch.tensor([i for i, at in enumerate(lags) if at == lag]).to(device) for lag in set(lags)}
        self.pending: list[tuple[int, int, Tensor, Tensor]] = []

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Apply the results that are due after a step, and send the fragments whose round it is."""
        self.apply_due(step)
        place = (step - 1) % self.network.every + 1
        for number, inside in enumerate(self.slices):
            if (number + 1) * self.network.every // self.fragments == place:
                now = self.flat[..., inside].clone()
                drift = self.anchor[:, None, inside] - now
                sent = coded(drift + self.residual[..., inside], self.network.code)
                self.residual[..., inside] += drift - sent
                if self.network.code == "sparse":
                    self.residual[..., inside] *= 0.95
                self.pending.append((step + self.network.delay, number, sent.mean(1), now))
        self.apply_due(step)

    def apply_due(self, step: int) -> None:
        while self.pending and self.pending[0][0] <= step:
            _, number, mean_drift, sent = self.pending.pop(0)
            inside = self.slices[number]
            self.anchor[:, inside] -= self.outer_step(number, mean_drift)
            self.flat[..., inside] += self.anchor[:, None, inside] - sent

    def outer_step(self, number: int, drift: Tensor) -> Tensor:
        of, past, q, mu = self.of, self.past[number], self.q[number], self.mu[number]
        for lag, cells in self.at_lag.items():
            if len(past) >= lag:
                q[cells] = F.cosine_similarity(drift[cells], past[-lag][cells], 1, 1e-30)
        self.mu[number] = mu = torch.minimum((mu + self.gain * (q - of["aim"])).clamp_min(0.0), of["most"])
        buffer = self.buffer[:, self.slices[number]]
        buffer.mul_(mu[:, None]).add_(drift)
        applied = of["lr"][:, None] * (drift + mu[:, None] * buffer)
        self.past[number] = [*past, applied][-max(self.at_lag) :]
        return applied


def coded(x: Tensor, code: str) -> Tensor:
    """What is sent of [cells, workers, entries]; bits are unbiased on a grid per 512 entries, two are Lloyd's."""
    if code == "sparse":
        size = x.abs()
        return x * (size >= size.kthvalue(round((1 - SPARSE) * x.size(2)), 2, True).values)
    bits = int(code)
    padded = F.pad(x, (0, -x.size(2) % 512))
    blocks = padded.view(*padded.shape[:2], -1, 512)
    size = blocks.abs()
    if bits == 2:
        is_large = size > size.mean(3, keepdim=True)
        means = [(size * m).sum(3, True) / m.sum(3, True).clamp_min(1) for m in (is_large, ~is_large)]
        values = torch.where(is_large, means[0], means[1]).copysign(blocks)
    else:
        unit = size.amax(3, keepdim=True).clamp_min(1e-30) / (2 ** (bits - 1) - 1)
        values = torch.floor(blocks / unit + torch.rand_like(blocks)) * unit
    return values.flatten(2)[..., : x.size(2)]


def rate(cell: Cell, step: int) -> float:
    """The inner learning rate: a short warm-up, then a cosine to a tenth, or constant."""
    best = LR * cell.lr_factor * (0.4 if cell.schedule == "constant" else 1.0)
    if step < 20:
        return best * (step + 1) / 20
    share = (step - 20) / (STEPS - 20)
    return best if cell.schedule == "constant" else best * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def train(network: Network, cells: Sequence[Cell], text: Tensor, vocabulary: int) -> list[float]:
    """Validation losses of the cells' mean models at the end."""
    device = text.device
    torch.manual_seed(0)
    split, workers = int(0.9 * len(text)), network.workers
    model = Gpts(vocabulary, cells, workers, device)
    inner = Inner(model, workers * sum(cell.inner == "adamw" for cell in cells))
    outer = Outer(model, network, cells)
    window = torch.arange(BLOCK + 1, device=device)
    seeds = sorted({cell.seed for cell in cells})
    draws = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
    starts = torch.stack([torch.randint(split - BLOCK - 1, (STEPS, SEQUENCES), generator=draw) for draw in draws])
    starts = starts.to(device)
    of_seed = torch.tensor([seeds.index(cell.seed) for cell in cells], device=device)
    rates = torch.tensor([[rate(cell, step) for cell in cells] for step in range(STEPS)])
    rates = rates.repeat_interleave(workers, 1).to(device)[..., None]
    for step in range(STEPS):
        chunk = text[starts[:, step, :, None] + window][of_seed].view(len(model.flat), -1, BLOCK + 1)
        model.grad.zero_()
        model.losses(chunk[..., :-1], chunk[..., 1:], model.p).sum().backward()  # type: ignore[no-untyped-call]
        model.grad.mul_((1.0 / (model.grad.norm(dim=1, keepdim=True) + 1e-6)).clamp_max_(1.0))  # as scripts clip
        inner.step_(rates[step])
        outer.after(step + 1)
    with torch.no_grad():
        p = model.views(model.flat.view(len(cells), workers, -1).mean(1))
        at = torch.arange(split, len(text) - BLOCK - 1, (len(text) - split - BLOCK - 2) // 256, device=device)
        chunks = [text[some[:, None] + window].expand(len(cells), -1, -1) for some in torch.split(at, 32)]
        losses = [model.losses(chunk[..., :-1], chunk[..., 1:], p) for chunk in chunks]
        return [float(loss) for loss in torch.stack(losses).mean(0)]


def rows_of(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a record: how far each rule's loss, the mean over seeds, is behind the best fixed one's of each cell.

    The part "fragments" compares networks under each rule instead, with its first one.
    """
    losses: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        shared, compared = line["network"], line["rule"]
        if line["part"] == "fragments":
            shared, compared = compared, shared
        key = (line["part"], shared, line["inner"], line["schedule"], line["lr_factor"])
        losses[key][compared].append(line["loss"] if math.isfinite(line["loss"]) else math.inf)
    behind: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (part, *_), by_rule in losses.items():
        means = {rule: mean(values) for rule, values in by_rule.items()}
        controls = [str(NETWORKS[part][0])] if part == "fragments" else FIXED
        best = min(means[control] for control in controls)
        for rule, loss in means.items():
            behind[rule][part].append(100 * (loss / best - 1))
    rows = []
    for rule, of_part in behind.items():
        row: dict[str, Any] = {"network" if "fragments" in of_part else "outer momentum": rule}
        for part, gaps in of_part.items():
            row[f"{part}: mean gap %"] = round(mean(gaps), 2)
            row[f"{part}: worst gap %"] = round(max(gaps), 2)
            row[f"{part}: cells over 1 %"] = sum(gap > 1 for gap in gaps)
            row[f"{part}: cells"] = len(gaps)
        rows.append(row)
    return rows


def main() -> None:
    """Train all cells of a part, each line as it comes; or print the rows of a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*NETWORKS, "rows"])
    parser.add_argument("files", type=Path, nargs="+", help="the text, or what was written before")
    parser.add_argument("--out", type=Path, help="a file of JSON lines, to which cells are added")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rules", help="names, with a semicolon between them")
    parser.add_argument("--share", default="0/1", help="i/n: every n-th network, from the i-th on")
    args = parser.parse_args()
    if args.part == "rows":
        lines = [json.loads(line) for file in args.files for line in file.read_text().splitlines()]
        print(json.dumps(rows_of(lines), indent=1))
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    raw = args.files[0].read_text()
    letters = sorted(set(raw))
    text = torch.tensor([letters.index(c) for c in raw], device=args.device)
    cells = cells_of(args.rules.split(";") if args.rules else list(RULES), SEEDS[args.part])
    share, shares = map(int, args.share.split("/"))
    for network in NETWORKS[args.part][share::shares]:
        start = time.perf_counter()
        losses = train(network, cells, text, len(letters))
        with args.out.open("a") as out:
            for cell, loss in zip(cells, losses, strict=True):
                line = {"part": args.part, "network": str(network), **asdict(cell), "loss": round(loss, 5)}
                out.write(json.dumps(line) + "\n")
        print(f"{network}: {len(cells)} cells in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
