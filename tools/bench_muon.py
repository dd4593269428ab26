"""Time Muon's step on a GPU, against the matrix products that it cannot do without, and against AdamW's step.

    python tools/bench_muon.py --layers 12 --width 768

The shapes are those of a GPT: q, k and v in one matrix, a projection, and two matrices four times as wide; its
embeddings, its head and its vectors are AdamW's. One JSON object is printed, with medians in milliseconds:

    step        the whole step of laconic.optim.Muon, matrices and the rest
    matrices    the step of the matrices alone
    products    five times X X^T, A A and B X, as plain batched products over matrices of one shape, and nothing else
    adamw       the step of torch.optim.AdamW over all parameters (foreach), and fused
    one_by_one  the step of torch.optim.Muon over the matrices, where torch has one
    host        what a processor needs to launch `step`
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic.optim import Muon

_STEPS_AT_ONCE = 10  # between two events: what is launched early enough waits for no processor


def shapes(layers: int, width: int) -> dict[tuple[int, int], int]:
    """Return how many matrices of each shape the hidden layers have."""
    kinds = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    return dict.fromkeys(kinds, layers)


def _products(kinds: dict[tuple[int, int], int], device: torch.device) -> Callable[[], None]:
    """Return a function that multiplies as Newton-Schulz does: 5 x (gram, square, apply) for each stack."""
    stacks: list[tuple[Tensor, ...]] = []
    for (rows, cols), number in kinds.items():
        short, long = sorted((rows, cols))
        x = torch.randn(number, short, long, device=device, dtype=torch.bfloat16) / long
        a, b = (torch.empty(number, short, short, device=device, dtype=torch.bfloat16) for _ in range(2))
        stacks.append((x, a, b, torch.empty_like(x)))

    def multiply() -> None:
        for x, a, b, y in stacks:
            for _ in range(5):
                torch.bmm(x, x.mT, out=a)
                torch.bmm(a, a, out=b)
                torch.bmm(b, x, out=y)

    return multiply


def _median_ms(work: Callable[[], Any], rounds: int) -> float:
    times: list[float] = []
    for number in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(_STEPS_AT_ONCE):
            work()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end) / _STEPS_AT_ONCE)
    return statistics.median(times)


def _host_ms(work: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def _parameters(sizes: list[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    params: list[Tensor] = []
    for size in sizes:
        p = torch.nn.Parameter(0.02 * torch.randn(size, device=device))
        p.grad = 0.01 * torch.randn_like(p)
        params.append(p)
    return params


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=65, help="rows of the embedding, which is the head as well")
    parser.add_argument("--rounds", type=int, default=20, help="of ten steps each")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    kinds = shapes(options.layers, options.width)
    matrices = _parameters([kind for kind, number in kinds.items() for _ in range(number)], device)
    vectors: list[tuple[int, ...]] = [(options.width,)] * (2 * options.layers + 1)
    others = _parameters([(options.vocabulary, options.width), (1024, options.width), *vectors], device)
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    whole, alone = Muon(groups), Muon(groups[:1])
    timed: dict[str, Callable[[], Any]] = {
        "products": _products(kinds, device),
        "step": whole.step,
        "matrices": alone.step,
        "adamw": torch.optim.AdamW([*matrices, *others], foreach=True).step,
        "adamw_fused": torch.optim.AdamW([*matrices, *others], fused=True).step,
    }
    if hasattr(torch.optim, "Muon"):
        timed["one_by_one"] = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw").step
    times = {name: _median_ms(work, options.rounds) for name, work in timed.items()}
    times["host"] = _host_ms(whole.step, options.rounds)
    record = {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in [*matrices, *others]),
        "ms": {name: round(value, 3) for name, value in times.items()},
        "step_over_products": round(times["step"] / times["products"], 3),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
