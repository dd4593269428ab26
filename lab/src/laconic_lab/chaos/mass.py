"""The balance between processes: all that ranks gave was applied, or is owed by a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from laconic.layout import Bucket
from laconic.recipes import parse, topk
from laconic.scheme import Scheme
from laconic_lab.errors import TaskError
from laconic_lab.train.checkpoint import find_checkpoint

_KEEPS_ALL = topk(rho=0.05).memory
_ATOL = 1e-3  # float32 roundings of some 1e5 entries, of signs at random; an entry that counts is above 1e-2
_RTOL = 1e-5


def keeps_all(text: str) -> bool:
    """Return whether each rank owes all that it has not sent, and nobody else owes anything."""
    scheme = parse(text)
    return isinstance(scheme, Scheme) and scheme.memory == _KEEPS_ALL and not scheme.has_owners


class Tally:
    """Sums of what one rank gave and of the means that were applied, by parameter, each as one number.

    That number is the product with signs drawn for the parameter's name: linear, so it is conserved where all entries
    are, and a few bytes that fit on a full disk.
    """

    def __init__(self, home: Path, rank: int) -> None:
        self._home = home
        self._rank = rank
        self.sums: dict[str, list[float]] = {}  # by name: (given, applied)

    def give(self, bucket: Bucket) -> None:
        """Add the gradient that goes into a step."""
        self._add(bucket, 0)

    def apply(self, bucket: Bucket) -> None:
        """Add the mean that was applied."""
        self._add(bucket, 1)

    def _add(self, bucket: Bucket, column: int) -> None:
        for span in bucket.layout.spans:
            self.sums.setdefault(span.name, [0.0, 0.0])[column] += _number(
                span.name, bucket.flat[span.start : span.stop]
            )

    def save(self, step: int) -> None:
        """Write it down beside a checkpoint."""
        self._file(step).write_text(json.dumps(self.sums))

    def load(self, step: int) -> None:
        """Go on from there."""
        self.sums = json.loads(self._file(step).read_text())

    def _file(self, step: int) -> Path:
        return _file(self._home, self._rank, step)


def mass_lost(home: Path, out: Path) -> list[str]:
    """The promise that is broken where the newest checkpoint in `out` owes more or less than was not applied."""
    try:
        checkpoint = find_checkpoint(out)
    except TaskError:  # none was written
        return []
    sessions = [state["session"] for state in checkpoint.load()]
    tallies = [json.loads(_file(home, session["rank"], checkpoint.step).read_text()) for session in sessions]
    lost = imbalance(tallies, [session["memory"]["residual"] for session in sessions])
    return [f"no mass is lost across checkpoints: step {checkpoint.step}, {lost}"] if lost else []


def imbalance(tallies: Sequence[Mapping[str, Sequence[float]]], owed: Sequence[Mapping[str, Tensor]]) -> str:
    """The first parameter of which given = applied + owed does not hold over all ranks, or nothing."""
    for name in tallies[0]:
        given, applied = (sum(column) for column in zip(*(tally[name] for tally in tallies), strict=True))
        kept = sum(_number(name, residuals[name]) for residuals in owed)
        if not abs(given - applied - kept) <= _ATOL + _RTOL * (abs(given) + abs(applied) + abs(kept)):
            return f"{name}: {given:g} given, {applied:g} applied, {kept:g} owed"
    return ""


def _file(home: Path, rank: int, step: int) -> Path:
    return home / f"tally-{rank}-{step}"


def _number(name: str, values: Tensor) -> float:
    draw = torch.Generator().manual_seed(crc32(name.encode()))
    signs = torch.randint(2, (values.numel(),), generator=draw, dtype=torch.int8).double().mul_(2).sub_(1)
    return float(signs @ values.reshape(-1).double())
