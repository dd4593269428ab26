"""Candidates of a plan: schemes, and how many more steps than bf16 each needs to the same loss, by our records."""

import json
import math
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.adapters.optimizers import is_adams_kin, is_muon
from laconic.errors import SchemeError
from laconic.layout import Layout
from laconic.paths import bytes_out
from laconic.recipes import parse
from laconic.replicas import Optimizers, listed
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
    "streaming:bits=2",
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
    """The candidate that a text names: a scheme, and behind it `--accumulate N`, if anything."""
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


OPTIMIZERS = ("sgd", "adamw", "muon")  # by their kinds, which records are of
_MATRIX = Layout.of(["a matrix"], [torch.Size((1024, 1024))])
_RECORD = Path(__file__).with_name("steps_to_target.json")  # a copy of the record of that name, which a test compares


@dataclass(frozen=True)
class Penalty:
    """Steps to a target over those of bf16: the median over seeds, and how far apart they lay."""

    factor: float  # inf: not reached in three times the steps
    low: float
    high: float
    source: str  # whose figure it is


def kind_of(model: nn.Module) -> str:
    """A transformer, or else convolutional: the two kinds that records are of."""
    attends = any("attention" in type(module).__name__.lower() for module in model.modules())
    embeds = any(isinstance(module, nn.Embedding) for module in model.modules())
    return "transformer" if attends or embeds else "convolutional"


def optimizer_name(optimizer: Optimizers) -> str:
    """Muon's kind, which makes matrices orthogonal, Adam's, which divides by a running norm, or SGD's."""
    optimizers = listed(optimizer)
    if any(map(is_muon, optimizers)):
        return "muon"
    return "adamw" if any(is_adams_kin(each, group) for each in optimizers for group in each.param_groups) else "sgd"


@cache  # a plan asks at fifty rates of links
def penalty_of(wanted: Candidate, kind: str, optimizer: str) -> Penalty | None:
    """The record's figure for this scheme, else for the nearest of its recipe; None where there is none."""
    rows = [row for row in _rows() if row["optimizer"] == optimizer]
    rows = [row for row in rows if row["kind"] == kind] or rows
    alike = [row for row in rows if row["candidate"] == wanted or _recipe(row["candidate"]) == _recipe(wanted)]
    if not alike:
        return None
    row = min(alike, key=lambda row: (row["candidate"] != wanted, _distance(row["candidate"], wanted)))
    source = f"{row['candidate']} on {row['model']} under {row['optimizer']}"
    factor, low, high = (
        math.inf if row[name] is None else row[name] for name in ("factor", "factor_low", "factor_high")
    )
    return Penalty(max(1.0, factor), low, high, source)  # nothing that says less learns more; seeds differ by a tenth


def _recipe(candidate: Candidate) -> str:
    return str(candidate.scheme).partition(":")[0]


def _distance(one: Candidate, other: Candidate) -> float:
    """The distance of two candidates of a recipe: in bytes of an exchange, and steps between two of them."""

    def size(of: Candidate) -> tuple[float, float]:
        num_bytes = 1 if of.scheme.of_what == "models" else bytes_out(of.scheme.exchanged, _MATRIX, 4)
        rounds = getattr(of.scheme, "when", None)
        return num_bytes, of.accumulate * getattr(rounds, "every", 1)

    pairs = zip(size(one), size(other), strict=True)
    return sum(abs(math.log(a / b)) for a, b in pairs)


@cache
def _rows() -> list[dict[str, Any]]:
    rows = []
    for row in json.loads(_RECORD.read_text())["rows"]:
        accumulate = row.get("accumulate") or 1
        text = row["scheme"] if accumulate == 1 else f"{row['scheme']} --accumulate {accumulate}"
        if not text.startswith("torch-"):
            rows.append({**row, "candidate": candidate(text)})
    return rows
