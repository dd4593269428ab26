"""Schemes on four jobs that no default was tuned on: nanoGPT's own train.py, a ViT, an LSTM, and fine-tuning.

    python -m torch.distributed.run --nproc-per-node 4 tools/untuned.py vit lstm finetune --data DIR --out FILE
    python tools/untuned.py diff --data DIR                          # what of train.py is changed

DIR holds nanoGPT (its public repository), input.txt (Tiny Shakespeare) and cifar-small.npz. The four processes follow
each other over Gloo on this machine. A dense run is one process with four times the batch, which is what averaging
gradients comes to; every process makes its share of those. The loss is the averaged model's on held-out data.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import functools
import gc
import io
import itertools
import json
import math
import os
import pickle
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import laconic

MUON_RATE = 4.0  # of its matrices, times AdamW's
ONE_BUCKET_MB = 1024  # PyTorch's PowerSGD fails over Gloo where there are several


@dataclass(frozen=True)
class Entry:
    """A row of the table: how a job is trained."""

    scheme: str  # or dense
    inner: str = "adamw"
    rate: float = 1.0  # times the job's own

    def __str__(self) -> str:
        return f"{self.scheme}, {self.inner}" + (f", rate x {self.rate:g}" if self.rate != 1 else "")

    @classmethod
    def of(cls, text: str) -> Entry:
        """The one of a text like "SCHEME; INNER; RATE", the last two of which may be left out."""
        words = [word.strip() for word in text.split(";")]
        scheme, inner, rate = words + ["adamw", "1"][len(words) - 1 :]
        return cls(scheme, inner, float(rate))


ENTRIES = [
    Entry("dense"),
    Entry("dense", rate=2.0),
    Entry("dense", rate=3.0),
    Entry("dense", "muon"),
    Entry("local:every=16"),
    Entry("streaming"),
    Entry("muloco:every=16,fragments=4,delay=4", "muon"),
    Entry("streaming:momentum=0.6"),
    Entry("muloco:every=32,fragments=4,delay=8,bits=2", "muon"),
    Entry("streaming", "muon"),
    Entry("streaming:momentum=0.9"),
    Entry("streaming:bits=2"),
    Entry("streaming:every=8,delay=2,bits=2"),
    Entry("muloco:every=16,fragments=4,delay=4,bits=2", "muon"),
    Entry("muloco:every=8,fragments=4,delay=2,bits=2", "muon"),
]


@dataclass
class Job:
    """A model, batches of its data by worker, and its loss."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    held_out: list[tuple[Tensor, Tensor]]
    lr: float
    steps: int
    decay: Callable[[float], float]  # from the share of steps after the warm-up to that of the rate


def _cosine(share: float) -> float:
    return 0.1 + 0.45 * (1 + math.cos(math.pi * share))


class ViT(nn.Module):
    """A vision transformer of patches of 4 x 4 pixels."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(1, 64, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        for block in self.blocks.layers:  # copies of one, which should begin apart
            block.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).mT + self.place
        return self.head(self.blocks(patches).mean(1))  # type: ignore[no-any-return]


def vit(data: Path, device: torch.device, seed: int) -> Job:
    """A ViT on 10,000 images of CIFAR-10, mirrored and shifted at random."""
    arrays = np.load(data / "cifar-small.npz")
    images, held_out = (
        ((torch.tensor(arrays[f"{part}_x"], device=device) / 255) - 0.47) / 0.25 for part in ("train", "test")
    )
    labels, held_out_labels = (torch.tensor(arrays[f"{part}_y"], device=device).long() for part in ("train", "test"))
    padded = F.pad(images, (4, 4, 4, 4))

    def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        at = torch.randint(len(labels), (32,), generator=draw)
        top, left, is_mirrored = torch.randint(9, (3,), generator=draw).tolist()
        some = padded[at.to(device), :, top : top + 32, left : left + 32]
        return some.flip(3) if is_mirrored % 2 else some, labels[at.to(device)]

    parts = list(zip(torch.split(held_out, 500), torch.split(held_out_labels, 500), strict=True))
    return Job(ViT, batch, lambda model, x, y: F.cross_entropy(model(x), y), parts, 1e-3, 300, _cosine)


class Lstm(nn.Module):
    """Two layers of an LSTM on characters."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.lstm = nn.LSTM(64, width, 2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])  # type: ignore[no-any-return]


def _texts(text: bytes, device: torch.device, length: int, sequences: int) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Batches of the first nine tenths of a text, and what is held out of it."""
    whole = torch.tensor(list(text), device=device)
    split, window = int(0.9 * len(whole)), torch.arange(length + 1, device=device)

    def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        at = torch.randint(split - length - 1, (sequences,), generator=draw).to(device)
        chunk = whole[at[:, None] + window]
        return chunk[:, :-1], chunk[:, 1:]

    at = torch.linspace(split, len(whole) - length - 1, 512, device=device).long()
    chunks = [whole[some[:, None] + window] for some in torch.split(at, 64)]
    return batch, [(chunk[:, :-1], chunk[:, 1:]) for chunk in chunks]


def _next_letter(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def lstm(data: Path, device: torch.device, seed: int) -> Job:
    """An LSTM on Tiny Shakespeare."""
    batch, held_out = _texts((data / "input.txt").read_bytes(), device, 128, 16)
    return Job(Lstm, batch, _next_letter, held_out, 3e-3, 300, _cosine)


_pretrained: dict[int, nn.Module] = {}


def finetune(data: Path, device: torch.device, seed: int) -> Job:
    """A GPT that has learned half of Tiny Shakespeare goes on with Python's library; its rate falls linearly."""
    sys.path.insert(0, str(data / "nanoGPT"))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    def fresh() -> nn.Module:
        with contextlib.redirect_stdout(io.StringIO()):
            config = GPTConfig(block_size=128, vocab_size=256, n_layer=4, n_head=4, n_embd=192, dropout=0.0, bias=False)
            return GPT(config)  # type: ignore[no-any-return]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(x, y.contiguous())[1]  # type: ignore[no-any-return]

    text = (data / "input.txt").read_bytes()
    if seed not in _pretrained:
        batch, held_out = _texts(text[: len(text) // 2], device, 128, 64)
        first = Job(fresh, batch, loss, held_out, 1e-3, 300, _cosine)
        _pretrained[seed] = train(first, Entry("dense"), seed, 0, 1, device)[0]
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    source = b"".join(file.read_bytes() for file in files)[: 2 * len(text)]
    batch, held_out = _texts(source, device, 128, 16)
    model = _pretrained[seed]
    return Job(lambda: copy.deepcopy(model), batch, loss, held_out, 3e-4, 200, lambda share: 1 - share)


SMALL = {"vit": vit, "lstm": lstm, "finetune": finetune}


def _optimizer(model: nn.Module, entry: Entry, lr: float) -> torch.optim.Optimizer:
    if entry.inner == "muon":
        return laconic.optim.Muon(model, lr=MUON_RATE * lr, adamw_lr=lr)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def train(
    job: Job, entry: Entry, seed: int, rank: int, workers: int, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and what is known of it; a dense one has the batches of all workers."""
    torch.manual_seed(seed)
    model = job.model().to(device)
    torch.manual_seed(1000 * seed + rank)  # dropout
    optimizer = _optimizer(model, entry, job.lr * entry.rate)
    warmup = 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: min((at + 1) / warmup, job.decay(max(0, at - warmup) / (job.steps - warmup)))
    )
    is_dense = entry.scheme == "dense"
    follower = None if is_dense else laconic.follow(model, optimizer, entry.scheme)
    draws = [torch.Generator().manual_seed(10_000 * seed + worker) for worker in range(workers)]
    for _ in range(job.steps):
        batches = [job.batch(draw) for draw in (draws if is_dense else draws[rank : rank + 1])]
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        job.loss(model, x, y).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if follower is not None:
            follower.step()
    about: dict[str, Any] = {}
    if follower is not None:
        follower.average_()
        about["momentum"] = follower.stats().momentum
        follower.close()
    model.eval()
    with torch.no_grad():
        about["loss"] = statistics.fmean(float(job.loss(model, x, y)) for x, y in job.held_out)
    return model.train(), about


# Old and new text of nanoGPT's train.py. Each process is a worker of its own instead of a rank of DDP.
CHANGES = [
    ("ddp = int(os.environ.get('RANK', -1)) != -1 # is this a ddp run?", "ddp = False # laconic follows instead"),
    ("    seed_offset = 0\n", "    seed_offset = RANK + 1000 * SEED\n"),
    (
        "checkpoint = None # free up memory\n",
        "checkpoint = None # free up memory\n"
        "if MUON:\n"
        "    optimizer = laconic.optim.Muon(model, weight_decay=weight_decay, betas=(beta1, beta2))\n"
        "model, follower = JOINED(model, optimizer)\n",
    ),
    (
        "        param_group['lr'] = lr\n",
        "        param_group['lr'] = lr * (MUON if param_group.get('use_muon') else 1)\n",
    ),
    (
        "    if iter_num % eval_interval == 0 and master_process:\n        losses = estimate_loss()\n",
        "    if iter_num and iter_num % eval_interval == 0 and master_process:\n"
        "        with torch.random.fork_rng(), follower.averaged() if hasattr(follower, 'step') else nullcontext():\n"
        "            torch.manual_seed(1) # the same batches for all\n"
        "            losses = estimate_loss()\n"
        "        CURVE.append((iter_num, round(float(losses['val']), 4)))\n",
    ),
    ("best_val_loss = 1e9\n", "best_val_loss = 0 # no checkpoints\n"),
    ("    if iter_num == 0 and eval_only:\n", "    if iter_num == max_iters:\n"),
    (
        "    scaler.update()\n",
        "    scaler.update()\n    if hasattr(follower, 'step'):\n        follower.step()\n",
    ),
    ("    dt = t1 - t0\n", "    dt = t1 - t0\n    STEP_S.append(dt)\n"),
]
SIZES = "n_layer=12 n_head=12 n_embd=768 block_size=256 batch_size=16 dropout=0.1"
LENGTH = "learning_rate=5e-4 min_lr=5e-5 max_iters=320 lr_decay_iters=320 eval_interval=320 warmup_iters=100 beta2=0.99"
OTHER = "log_interval=1 eval_iters=60 compile=False dataset=shakespeare_char always_save_checkpoint=False"


def patched(source: str) -> str:
    """train.py with its changes; an error where it is another version."""
    for old, new in CHANGES:
        if source.count(old) != 1:
            raise SystemExit(f"this train.py has {source.count(old)} times {old!r}; take nanoGPT's own")
        source = source.replace(old, new)
    return source


def prepare(data: Path, folder: Path) -> None:
    """nanoGPT with its characters of Tiny Shakespeare, as its prepare.py writes them."""
    shutil.copytree(data / "nanoGPT", folder, dirs_exist_ok=True)
    text = (data / "input.txt").read_text()
    letters = sorted(set(text))
    ids = np.array([letters.index(letter) for letter in text], dtype=np.uint16)
    home = folder / "data" / "shakespeare_char"
    for name, part in (("train", ids[: int(0.9 * len(ids))]), ("val", ids[int(0.9 * len(ids)) :])):
        part.tofile(home / f"{name}.bin")
    with (home / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": len(letters)}, file)


def joined(scheme: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    """The model to train, and what ties it to the other workers': a follower, one of PyTorch's hooks, or nothing."""
    if scheme == "dense":
        return model, None
    if not isinstance(laconic.parse(scheme), laconic.TorchHook):
        return model, laconic.follow(model, optimizer, scheme)
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    ddp.estimate_mfu = model.estimate_mfu  # which the script asks its model for
    return ddp, laconic.attach(ddp, scheme)


def nanogpt(
    folder: Path, entry: Entry, options: Sequence[str], seed: int, rank: int, device: torch.device
) -> dict[str, Any]:
    """What nanoGPT's own script comes to under a scheme; a dense run accumulates the batches of four."""
    source = patched((folder / "train.py").read_text())
    is_dense = entry.scheme == "dense"
    rate = f"learning_rate={5e-4 * entry.rate} min_lr={5e-5 * entry.rate}"
    accumulated = f"gradient_accumulation_steps={4 if is_dense else 1} device={device.type}"
    words = f"{SIZES} {LENGTH} {OTHER} {rate} {accumulated}".split()
    sys.argv = ["train.py", *(f"--{word}" for word in [*words, *options])]
    step_s: list[float] = []
    curve: list[tuple[int, float]] = []
    given: dict[str, Any] = {"__name__": "__main__", "laconic": laconic, "SEED": seed, "STEP_S": step_s, "CURVE": curve}
    given["JOINED"] = functools.partial(joined, entry.scheme)
    given |= {"MUON": MUON_RATE if entry.inner == "muon" else 0, "RANK": 0 if is_dense else rank}
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, "train.py", "exec"), given)
    about = {"loss": float(given["losses"]["val"]), "first_ms": [round(1e3 * s) for s in step_s[:100]]}
    about["curve"] = curve
    if follower := given["follower"]:
        about["momentum"] = getattr(follower.stats(), "momentum", None)
        about["bytes_out"] = follower.stats().bytes_out
        follower.close()
    return {**about, "median_ms": round(1e3 * statistics.median(step_s), 1)}


def main() -> None:
    """Train every job under every entry, and write a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", choices=["nanogpt", *SMALL, "diff"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", default="0", help="numbers, with a comma between them")
    parser.add_argument("--entry", action="append", help='"SCHEME; INNER; RATE" instead of the table; may be repeated')
    parser.add_argument("--steps", type=int, help="of the small jobs, for a trial")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of nanoGPT's, for a trial")
    args = parser.parse_args()
    if args.jobs == ["diff"]:
        source = (args.data / "nanoGPT" / "train.py").read_text()
        old, new = (text.splitlines(keepends=True) for text in (source, patched(source)))
        sys.stdout.writelines(difflib.unified_diff(old, new, "nanoGPT/train.py", "train.py with laconic", n=1))
        return
    args.out = args.out.resolve()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    device = torch.device(args.device)
    entries = [Entry.of(text) for text in args.entry] if args.entry else ENTRIES
    with tempfile.TemporaryDirectory() as folder:
        if "nanogpt" in args.jobs:
            prepare(args.data, Path(folder))
        every = list(itertools.product(map(int, args.seeds.split(",")), args.jobs, entries))
        dense = [run for run in every if run[2].scheme == "dense"]
        rest = [run for run in every if run[2].scheme != "dense"]
        for seed, name, entry in [*dense[rank::workers], *rest]:
            start = time.perf_counter()
            try:
                if name == "nanogpt":
                    about = nanogpt(Path(folder), entry, args.option, seed, rank, device)
                else:
                    job = SMALL[name](args.data, device, seed)
                    job.steps = args.steps or job.steps
                    about = train(job, entry, seed, rank, workers, device)[1]
            except Exception as error:  # the other runs are worth having
                traceback.print_exc()
                about = {"error": str(error)}
            if rank == 0 or entry.scheme == "dense":
                took = round(time.perf_counter() - start, 1)
                line = {"job": name, "entry": str(entry), "seed": seed, "seconds": took, **about}
                with args.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")
            gc.collect()  # a script's globals, which are a circle
            torch.cuda.empty_cache()
        dist.barrier()
        os.chdir("/")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
