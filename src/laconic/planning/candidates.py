"""What a plan compares: schemes, each with the number of a user's steps whose gradients add up to one exchange."""

import shlex
from dataclasses import dataclass

from laconic.errors import SchemeError
from laconic.recipes import parse
from laconic.scheme import AnyScheme

CANDIDATES: tuple[str, ...] = (
    "dense",
    "bf16",
    "bf16 --accumulate 2",
    "bf16 --accumulate 4",
    "bf16 --accumulate 8",
    "bf16 --accumulate 16",
    "maxnorm:bits=4",
    "topk:rho=0.01",
    "topk:rho=0.001",
    "overlap:rho=0.01",
    "lowrank:rank=4",
    "lowrank:rank=4,form=alternating",
    "local:every=16",
    "diloco:every=32",
    "streaming",
    "streaming:every=64",
    "sparseloco",
    "noloco",
    "gossip",
)
# What "auto" chooses among: a script's own batches, and bf16 for gradients that nobody compresses, so that no choice is
# slower than that by more than the margin of a simpler one.
AUTOMATIC = tuple(text for text in CANDIDATES if text != "dense" and "--accumulate" not in text)


@dataclass(frozen=True)
class Candidate:
    """A scheme, and how many micro-batches go into each of its exchanges."""

    scheme: AnyScheme
    accumulate: int = 1

    def __str__(self) -> str:
        return f"{self.scheme} --accumulate {self.accumulate}" if self.accumulate > 1 else str(self.scheme)


def candidate(text: str) -> Candidate:
    """What a text asks for: a scheme's, and behind it `--accumulate N`, if anything."""
    words = shlex.split(text)
    scheme = parse(words[0] if words else "")
    accumulate = 1
    if len(words) > 1:
        if words[1] != "--accumulate" or len(words) != 3 or not words[2].isdecimal() or int(words[2]) < 1:
            raise SchemeError(f"{text!r} is no candidate; give a scheme, or one like 'bf16 --accumulate 4'")
        accumulate = int(words[2])
    if scheme.is_torch_hook:
        raise SchemeError(f"{scheme} is PyTorch's own hook, which cannot be rehearsed; try it with `laconic compare`")
    if accumulate > 1 and scheme.of_what != "gradients":
        raise SchemeError(f"{scheme} exchanges no gradients that could add up; leave --accumulate out")
    return Candidate(scheme, accumulate)
