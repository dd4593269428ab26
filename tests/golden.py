"""Golden trajectories: what every deterministic scheme makes of given gradients, as digests in golden.json.

`python -m tests.golden` adds what the file lacks, and with `--anew` writes all of it: a change of numbers is a
decision, never an accident. Gradients are
multiples of 2^-12 made by integer arithmetic, what is written down is made by the reference kernels, and everything is
float32 on the CPU, so that a digest does not depend on the processor. PyTorch's two hooks live inside DDP, and what
gossips freely moves when answers come: neither has a trajectory of its own, and NOT_DETERMINISTIC lists them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic import Scheme, Session, parse
from laconic.transport import InProcess, in_process
from tests.gossiping import Learner, followed
from tests.parts import ALL_TEXTS, gossip_texts, outer_texts
from tests.virtual import LAYOUTS, one_core, one_step

FILE = Path(__file__).with_suffix(".json")
M = 4

NOT_DETERMINISTIC = (
    "torch-fp16",
    "torch-powersgd:rank=2",
    "gossip:rate=0.3",
    "gossip-every",
    "gossip-period:steps=3",
    "gossip:rate=0.3,quantize=none",
    "gossip:trigger=target-rate(rate=0.3,per=model),peers=ring",
    "gossip-change:rate=0.3,quantize=modulo",
    "gossip:rho=0.2,rate=0.22",
    "gossip:rho=0.05,trigger=change(threshold=0.05),quantize=none",
)
TEXTS = tuple(text for text in (*ALL_TEXTS, *gossip_texts(), *outer_texts()) if text not in NOT_DETERMINISTIC)

# A mean or a norm decides something here, and a processor may add it up in another order, or a product and a sum are
# rounded once or twice: a sample must do.
ORDER_SHOWS = (
    "overlap:rho=0.05,score=product",
    "overlap:rho=0.05,score=sum,strength=0.5",
    "sign:vote=weighted",
    "sparse-sign:cover=1.5,weight=0.9,score=product,vote=weighted",
    "scheme:select=everything,quantize=sign,memory=residual,exchange=all-gather",
    "lowrank:rank=3",
    "lowrank:rank=2,form=alternating,quantize=bf16,warmup=2",
    "gossip:rho=1,trigger=change(threshold=0.05),quantize=none,peers=exponential,mode=matched",
    "gossip:rate=0.3,quantize=bf16,mode=matched,seed=4",
    "gossip:rho=0.2,trigger=target-rate(rate=0.3,per=model),quantize=none,mode=matched",
    "gossip-change:rate=0.3,quantize=modulo,mode=matched",
    "diloco:every=3",
    "streaming:every=4,fragments=2,delay=2",
    "streaming:every=2,fragments=2,delay=1,momentum=auto",
    "muloco:every=4,fragments=2,delay=2,bits=2",
    "muloco:every=2,warmup=1",
    "scheme:select=low-rank(rank=2),memory=residual,trigger=rounds(every=2,fragments=2,delay=1)",
)
# Of values up to about 20: each step multiplies by what the last one made of such a sum.
_LOOSE = {text: 0.05 for text in ORDER_SHOWS if "rank=" in text}
_SAMPLES = 64
_NAN = 12345.0  # which NaN it was does not matter

# Ten steps; and four of which one has a NaN, on one worker in the middle bucket.
STEPS = {"plain": 10, "overflow": 4}
_BAD_STEP = 2
_BAD_RANK = 2

Step = Callable[[Session, Mapping[str, Tensor]], dict[str, Tensor]]  # a session's, on given gradients by name


def trajectory(
    text: str, course: str = "plain", step_: Step = one_step, *, kernels: str = "reference"
) -> dict[str, Any]:
    """What the steps of M virtual workers come to: a digest, or a sample of values where the order of a sum shows."""

    def work(transport: InProcess) -> tuple[list[Tensor], dict[str, Any]]:
        if parse(text).of_what != "gradients":
            return _follow(text, transport, course)
        return _exchange(text, transport, course, step_)

    with _kernels(kernels), one_core():
        everyone = in_process(M, work)
    tensors = [tensor for tensors, _ in everyone for tensor in tensors]
    sent = [counts for _, counts in everyone]
    if text in ORDER_SHOWS:
        values = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors])
        places = torch.arange(_SAMPLES) * (values.numel() - 1) // (_SAMPLES - 1)
        return {"sample": values[places].nan_to_num(nan=_NAN).tolist()}
    digest = hashlib.sha256(json.dumps(sent, sort_keys=True).encode())
    for tensor in tensors:
        digest.update(str(tensor.dtype).encode() + tensor.nan_to_num(nan=_NAN).numpy().tobytes())
    return {"digest": digest.hexdigest()}


def tolerance(text: str) -> float:
    """How far a sample may be off on another processor."""
    return _LOOSE.get(text, 1e-6)


def courses_of(text: str) -> tuple[str, ...]:
    """A model of one's own has no gradient to overflow."""
    return tuple(STEPS) if parse(text).of_what == "gradients" else ("plain",)


def gradient(rank: int, step: int) -> dict[str, Tensor]:
    """Heavy-tailed multiples of 2^-12, other for each worker and with a part common to all."""
    found = {}
    for number, span in enumerate(span for layout in LAYOUTS for span in layout.spans):
        parts = [_whole(span.num_entries, M, step, number), _whole(span.num_entries, rank, step, number)]
        found[span.name] = sum(parts).to(torch.float32) * 2.0**-12  # type: ignore[union-attr]
    return found


@cache
def _whole(count: int, *key: int) -> Tensor:
    """Whole numbers under 2^15 in size: 16 bits of a hash, shifted right by a few others."""
    state = torch.arange(count, dtype=torch.int64)
    for number in key:
        state = ((state * 1_103_515_245 + 12_345 + 7919 * number) ^ (state >> 13)) & 0x7FFFFFFF
    state = (state * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return ((state >> 8 & 0xFFFF) - 0x8000) >> (state >> 24 & 7)


def _exchange(text: str, transport: InProcess, course: str, step_: Step) -> tuple[list[Tensor], dict[str, Any]]:
    """(results of all steps and what is kept after them, bytes by kind) of one worker that exchanges gradients."""
    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    session = Session(scheme, transport)
    tensors = []
    for step in range(STEPS[course]):
        given = gradient(transport.rank, step)
        if course == "overflow" and step == _BAD_STEP and transport.rank == _BAD_RANK:
            given["d"][3] = torch.nan
        result = step_(session, given)
        tensors += [result[name] for name in sorted(result)]
    state = session.state_dict()
    held = state["owner"].get("held", {})
    tensors += [*_leaves(state["memory"]), *_leaves(state["past"]), *_leaves(held)]
    return tensors, _counts(session.stats().by_kind)


def _follow(text: str, transport: InProcess, course: str) -> tuple[list[Tensor], dict[str, Any]]:
    """(the model after each step, bytes by kind) of one worker whose model wanders."""
    learner = Learner(text, transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
    with torch.no_grad():
        for number, tensor in enumerate(learner.model.parameters()):
            tensor.copy_(_whole(tensor.numel(), M, 99, number).view(tensor.shape) * 2.0**-12)
    tensors = []
    for step in range(STEPS[course]):
        with torch.no_grad():
            for number, tensor in enumerate(learner.model.parameters()):
                tensor.add_(_whole(tensor.numel(), transport.rank, step, number).view(tensor.shape) * 2.0**-17)
        learner.follower.step()
        tensors.append(learner.follower.vector.read().clone())
    return tensors, _counts(learner.follower.stats().by_kind)


def _leaves(tree: Mapping[str, Any]) -> Iterator[Tensor]:
    for name in sorted(tree):
        if isinstance(tree[name], Tensor):
            yield tree[name]
        else:
            yield from _leaves(tree[name])


def _counts(by_kind: Mapping[str, Any]) -> dict[str, list[int]]:
    return {kind: [count.bytes_out, count.bytes_in] for kind, count in by_kind.items()}


@contextmanager
def _kernels(backend: str) -> Iterator[None]:
    before = os.environ.get("LACONIC_KERNELS")
    os.environ["LACONIC_KERNELS"] = backend
    try:
        yield
    finally:
        del os.environ["LACONIC_KERNELS"]
        if before is not None:
            os.environ["LACONIC_KERNELS"] = before


def main() -> None:
    """Write golden.json: what it has already stays, unless all is asked for anew."""
    written = {} if "--anew" in sys.argv else json.loads(FILE.read_text())
    for text in TEXTS:
        if text not in written:
            written[text] = {course: trajectory(text, course) for course in courses_of(text)}
    FILE.write_text(json.dumps({text: written[text] for text in TEXTS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
