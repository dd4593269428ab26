"""What a scheme costs in steps: how many more it needs than bf16 to the same loss, from this project's own records."""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn, optim

from laconic.planning.candidates import Candidate, candidate

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


def optimizer_name(optimizer: optim.Optimizer) -> str:
    """Adam's kind, which divides by a running norm of the gradient, or SGD's, which does not."""
    return "adamw" if "betas" in optimizer.defaults else "sgd"


def penalty_of(asked: Candidate, kind: str, optimizer: str) -> Penalty | None:
    """The record's figure for this scheme, else for the nearest of its recipe; None where there is none."""
    rows = [row for row in _rows() if row["optimizer"] == optimizer]
    rows = [row for row in rows if row["kind"] == kind] or rows
    found = [row for row in rows if row["candidate"] == asked]
    if not found:
        name = _recipe(asked)
        alike = [row for row in rows if _recipe(row["candidate"]) == name]
        found = sorted(alike, key=lambda row: _distance(row["candidate"], asked))[:1]
    if not found:
        return None
    row = found[0]
    source = f"{row['candidate']} on {row['model']} under {row['optimizer']}"
    factor, low, high = (
        math.inf if row[name] is None else row[name] for name in ("factor", "factor_low", "factor_high")
    )
    return Penalty(max(1.0, factor), low, high, source)  # nothing that says less learns more; seeds differ by a tenth


def _recipe(asked: Candidate) -> str:
    return str(asked.scheme).partition(":")[0]


def _distance(one: Candidate, other: Candidate) -> float:
    """How much further apart than equal they are, in what leaves more out: entries, and steps between agreements."""

    def size(asked: Candidate) -> tuple[float, float]:
        select = getattr(asked.scheme, "select", None)
        rounds = getattr(asked.scheme, "trigger", None)
        return getattr(select, "density", 1.0), asked.accumulate * getattr(rounds, "every", 1)

    pairs = zip(size(one), size(other), strict=True)
    return sum(abs(math.log(max(a, 1e-9) / max(b, 1e-9))) for a, b in pairs)


@cache
def _rows() -> list[dict[str, Any]]:
    rows = []
    for row in json.loads(_RECORD.read_text())["rows"]:
        accumulate = row.get("accumulate") or 1
        text = row["scheme"] if accumulate == 1 else f"{row['scheme']} --accumulate {accumulate}"
        if not text.startswith("torch-"):
            rows.append({**row, "candidate": candidate(text)})
    return rows
