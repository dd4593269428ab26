"""The answer: candidates ranked by time to accuracy, what to paste, what limits, and what would change it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from laconic.layout import Layout
from laconic.paths import bytes_out
from laconic.planning.candidates import Candidate, candidate, penalty_of
from laconic.planning.links import LinkCosts, PairLink, rate_text
from laconic.planning.prediction import Compute, Rehearsal, predict

_MARGIN = 1.05  # by which another must be sooner than a simpler one
_WORTH_NAMING = 0.1  # share of a step
_SLOW_PAIR = 0.5  # of the median pair's rate
_LITTLE = 0.25  # of a step, that a network takes where nothing need be done about it
_NEGLIGIBLE = 0.1  # of a step: below, no other scheme is picked, whatever stragglers and load make of the rest
_PLAIN = ("dense", "bf16")
_RATES = tuple(10**6 * 10 ** (eighth / 8) for eighth in range(49))  # bits a second, 1mbit to 1tbit
_CURVE_RATES = _RATES[:41:2]  # to 100gbit


@dataclass(frozen=True)
class Measured:
    """The measurements of a model, its optimizer and its network, from which any number of answers follows."""

    compute: Compute
    links: LinkCosts
    rehearsals: tuple[tuple[Candidate, Rehearsal], ...]  # in order, the simpler first
    tried_s: tuple[tuple[Candidate, float], ...]  # steps of candidates that were really taken
    layouts: tuple[Layout, ...]
    num_workers: int
    kind: str  # of model
    optimizer: str
    device: str
    beyond_s: tuple[tuple[Candidate, float], ...] = ()  # that tried steps took elsewhere beyond what was predicted
    pairs: tuple[PairLink, ...] = ()

    @property
    def slowest_pair(self) -> PairLink | None:
        """The one of the least rate, among those whose messages were long enough to tell."""
        return min((pair for pair in self.pairs if pair.settled), key=lambda pair: pair.bytes_per_s, default=None)

    def with_tried(self, tried_s: Mapping[Candidate, float]) -> "Measured":
        """The same after steps were taken under candidates: no step alone is longer than one with an exchange.

        What accumulates follows from the same scheme's own step.
        """
        alone_s = min([self.compute.alone_s, *tried_s.values()])
        accumulated = {
            choice: ((choice.accumulate - 1) * alone_s + tried_s[once]) / choice.accumulate
            for choice, _ in self.rehearsals
            if choice.accumulate > 1 and (once := Candidate(choice.scheme)) in tried_s
        }
        compute = replace(self.compute, alone_s=alone_s)
        return replace(self, compute=compute, tried_s=tuple({**tried_s, **accumulated}.items()))

    def among(self, num_workers: int) -> "Measured":
        """The same job on other numbers of workers: bytes by choice scheme's own formula, the rest in proportion."""
        moved = (num_workers - 1) / max(1, self.num_workers - 1)
        sums = replace(self.links.sums, latency_s=self.links.sums.latency_s * moved)
        rehearsals = tuple((choice, self._grown(choice, one, num_workers, moved)) for choice, one in self.rehearsals)
        links = LinkCosts(sums, self.links.frames)
        return replace(self._elsewhere(), links=links, rehearsals=rehearsals, num_workers=num_workers)

    def _grown(self, choice: Candidate, one: Rehearsal, num_workers: int, moved: float) -> Rehearsal:
        sent = _bytes(choice, self.layouts, num_workers) / max(1, _bytes(choice, self.layouts, self.num_workers))
        apply_s = one.apply_s if one.adds else one.apply_s * moved
        return replace(one, talk_s=one.talk_s * sent, bytes_out=round(one.bytes_out * sent), apply_s=apply_s)

    def at(self, bits_per_s: float) -> "Measured":
        """The same job on links of another rate."""
        links = self.links.at(bits_per_s)
        rehearsals = tuple((choice, one.on(self.links, links)) for choice, one in self.rehearsals)
        return replace(self._elsewhere(), links=links, rehearsals=rehearsals)

    def _elsewhere(self) -> "Measured":
        """Without tried steps, of which stays by how much predictions were wrong: else what was tried would lose."""
        rehearsals = dict(self.rehearsals)
        beyond = {choice: s - predict(choice, self.compute, rehearsals[choice]).step_s for choice, s in self.tried_s}
        return replace(self, pairs=(), tried_s=(), beyond_s=tuple({**dict(self.beyond_s), **beyond}.items()))


def _bytes(choice: Candidate, layouts: Sequence[Layout], num_workers: int) -> int:
    scheme = choice.scheme
    if scheme.of_what != "models":
        return sum(bytes_out(scheme.exchanged, layout, num_workers) for layout in layouts)
    return 1  # a gossip's do not depend on how many there are


@dataclass(frozen=True)
class PlanRow:
    """One candidate: what a step takes and sends, what it costs in steps, and what that comes to."""

    scheme: str
    step_ms: float
    bytes_out: int
    memory_bytes: int
    waits_ms: float  # of a step, for the network alone
    steps_factor: float | None  # None: not known, or not reached
    steps_range: tuple[float, float] | None
    steps_source: str
    seconds_to_target: float | None
    tried: bool  # whether its steps were really taken, not predicted


@dataclass(frozen=True)
class Plan:
    """The schemes that pay on this model and network; str() is a table with reasons."""

    pick: str
    limit: str  # link, latency, stragglers, host cores or device
    rows: tuple[PlanRow, ...]  # the soonest first
    reasons: tuple[str, ...]
    steps: int  # of bf16, that the seconds are for
    seconds: float  # that planning took
    measured: Measured

    @property
    def line(self) -> str:
        """The line of code to paste."""
        if self.pick == "dense":
            return "leave the script as it is"
        picked = candidate(self.pick)
        verb = "attach(ddp" if picked.scheme.of_what == "gradients" else "follow(model, optimizer"
        text = f'laconic.{verb}, "{picked.scheme}")'
        return text if picked.accumulate == 1 else f"{text}  # and exchange every {picked.accumulate} steps (no_sync)"

    def what_if(self, *, workers: int | None = None, bits_per_s: float | None = None) -> "Plan":
        """The plan for another number of workers, or links of another rate."""
        measured = self.measured
        if workers is not None:
            measured = measured.among(workers)
        if bits_per_s is not None:
            measured = measured.at(bits_per_s)
        return answer(measured, steps=self.steps)

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """(bits a second, milliseconds of a step) of each scheme on links from 1mbit to 100gbit."""
        curves: dict[str, list[tuple[float, float]]] = {row.scheme: [] for row in self.rows}
        for rate in _CURVE_RATES:
            for row in _rows(self.measured.at(rate), self.steps):
                curves[row.scheme].append((rate, row.step_ms))
        return curves

    def as_dict(self) -> dict[str, Any]:
        slowest_pair = self.measured.slowest_pair
        return {
            "pick": self.pick,
            "limit": self.limit,
            "line": self.line,
            "reasons": list(self.reasons),
            "workers": self.measured.num_workers,
            "steps": self.steps,
            "seconds": self.seconds,
            "compute": asdict(self.measured.compute),
            "links": asdict(self.measured.links),
            "bits_per_s": self.measured.links.bits_per_s,
            "slowest_pair": asdict(slowest_pair) if slowest_pair else None,
            "rows": [asdict(row) for row in self.rows],
            "curves": self.curves(),
        }

    def __str__(self) -> str:
        return "\n".join([*_table(self), "", *self.reasons, f"-> {self.line}"])


def answer(measured: Measured, *, steps: int = 1000, seconds: float = 0.0) -> Plan:
    """Rank the candidates by the time to where bf16 is after so many steps; of nearly equal ones the simpler wins."""
    rows = _rows(measured, steps)
    pick = _picked(rows)
    limit = _limit(measured)
    return Plan(
        pick=pick.scheme,
        limit=limit,
        rows=tuple(sorted(rows, key=lambda row: row.seconds_to_target or math.inf)),
        reasons=tuple(_reasons(measured, rows, pick, limit, steps)),
        steps=steps,
        seconds=seconds,
        measured=measured,
    )


def _rows(measured: Measured, steps: int) -> list[PlanRow]:
    """In the order of their simplicity."""
    return [_row(choice, rehearsal, measured, steps) for choice, rehearsal in measured.rehearsals]


def _row(choice: Candidate, rehearsal: Rehearsal, measured: Measured, steps: int) -> PlanRow:
    predicted = predict(choice, measured.compute, rehearsal)
    penalty = penalty_of(choice, measured.kind, measured.optimizer)
    tried_s = dict(measured.tried_s).get(choice)
    foretold_s = max(measured.compute.alone_s, predicted.step_s + dict(measured.beyond_s).get(choice, 0.0))
    step_s = foretold_s if tried_s is None else tried_s
    reached = penalty if penalty is not None and math.isfinite(penalty.factor) else None
    return PlanRow(
        scheme=str(choice),
        step_ms=1e3 * step_s,
        bytes_out=round(predicted.bytes_out),
        memory_bytes=predicted.memory_bytes,
        waits_ms=1e3 * max(0.0, predicted.talk_s + step_s - predicted.step_s),
        steps_factor=reached.factor if reached else None,
        steps_range=(reached.low, reached.high) if reached else None,
        steps_source=penalty.source if penalty else "",
        seconds_to_target=steps * step_s * reached.factor if reached else None,
        tried=tried_s is not None,
    )


def _picked(rows: Sequence[PlanRow]) -> PlanRow:
    """The first, in the order of their simplicity, that no other beats by more than the margin.

    Where the network takes next to nothing of a plain step, there is nothing to be had from sending less.
    """
    plain = [row for row in rows if row.scheme in _PLAIN]
    if plain and plain[-1].waits_ms < _NEGLIGIBLE * plain[-1].step_ms:
        rows = plain
    known = [row for row in rows if row.seconds_to_target is not None] or list(rows)
    best = min(row.seconds_to_target or row.step_ms for row in known)
    return next(row for row in known if (row.seconds_to_target or row.step_ms) <= _MARGIN * best)


def _limit(measured: Measured) -> str:
    """The part that a step of the simplest exchange waits for most, if worth naming; else the one that computes."""
    compute = measured.compute
    computes = "host cores" if measured.device == "cpu" else "device"
    choice, rehearsal = next(((c, r) for c, r in measured.rehearsals if str(c) == "bf16"), measured.rehearsals[0])
    predicted = predict(choice, compute, rehearsal)
    link = measured.links.sums if rehearsal.adds else measured.links.frames
    latency_s = min(predicted.talk_s, link.fixed_s(rehearsal.bytes_out, rehearsal.messages))
    parts = {
        "latency": latency_s,
        "link": predicted.talk_s - latency_s,
        "stragglers": compute.together_s - compute.alone_s,
    }
    largest = max(parts, key=lambda name: parts[name])
    return largest if parts[largest] > _WORTH_NAMING * predicted.step_s else computes


def _reasons(measured: Measured, rows: Sequence[PlanRow], pick: PlanRow, limit: str, steps: int) -> list[str]:
    """The reasons, in words, and what would have to change for another answer."""
    by_name = {row.scheme: row for row in rows}
    reasons = []
    plain = by_name.get("bf16") or by_name.get("dense") or pick
    waits = plain.waits_ms / plain.step_ms
    if pick is plain or pick.scheme == "dense":
        share = f"the network is {100 * waits:.0f} % of a step under {plain.scheme}"
        nothing = "do not compress" if plain.scheme in _PLAIN else f"the soonest of {len(rows)}"
        reasons.append(f"{nothing}: {share}" if waits <= _LITTLE else f"nothing else is sooner, though {share}")
    else:
        reasons.append(f"the network is {100 * waits:.0f} % of a step under {plain.scheme}; what limits it: {limit}")
        if plain.seconds_to_target and pick.seconds_to_target:
            sooner = plain.seconds_to_target / pick.seconds_to_target
            reasons.append(
                f"{pick.scheme} is {sooner:.1f}x sooner than {plain.scheme}: {pick.step_ms:.0f} ms a step instead of "
                f"{plain.step_ms:.0f}, {pick.steps_factor:.2f} times the steps"
            )
    reasons += _turning_points(measured, pick, steps)
    reasons += _slow_pair(measured)
    if measured.compute.waits_for_slowest > _WORTH_NAMING:
        reasons.append(f"workers wait for the slowest for {100 * measured.compute.waits_for_slowest:.0f} % of a step")
    return reasons


def _slow_pair(measured: Measured) -> list[str]:
    """The pair that is much slower than the others, in words."""
    slowest = measured.slowest_pair
    if slowest is None:
        return []
    median = statistics.median(pair.bytes_per_s for pair in measured.pairs if pair.settled)
    if slowest.bytes_per_s > _SLOW_PAIR * median:
        return []
    ends = f"rank {slowest.source} sends to rank {slowest.target}"
    rates = f"at {rate_text(8 * slowest.bytes_per_s)}, others at {rate_text(8 * median)}"
    return [f"{ends} {rates} ({1e3 * slowest.latency_s:.3g} ms one way): ask `laconic doctor`"]


def _turning_points(measured: Measured, pick: PlanRow, steps: int) -> list[str]:
    """The nearest rates of links, up and down, from which on another candidate is picked.

    Where that is the same one both ways, chance has decided here, and nothing is said.
    """
    here = measured.links.bits_per_s
    others: list[tuple[str, float, str]] = []
    for rates, word in (
        ([rate for rate in _RATES if rate > here], "from"),
        ([rate for rate in reversed(_RATES) if rate < here], "below"),
    ):
        for rate in rates:
            other = _picked(_rows(measured.at(rate), steps))
            if other.scheme != pick.scheme:
                others.append((word, rate, other.scheme))
                break
    if len(others) == 2 and others[0][2] == others[1][2]:
        return []
    return [f"{word} about {rate_text(rate)} it would be {scheme}" for word, rate, scheme in others]


def _table(plan: Plan) -> list[str]:
    """Columns: scheme, step, waits, MB, steps, seconds."""
    head = ("scheme", "step ms", "waits ms", "MB out", "x steps", "seconds")
    lines = [head]
    for row in plan.rows:
        factor = "not reached" if row.steps_source else "-"
        if row.steps_factor is not None and row.steps_range is not None:
            factor = f"{row.steps_factor:.2f} ({row.steps_range[0]:.2f}-{row.steps_range[1]:.2f})"
        seconds = "-" if row.seconds_to_target is None else f"{row.seconds_to_target:,.0f}"
        step = f"{row.step_ms:,.1f}{'' if row.tried else '*'}"
        name = f"{row.scheme}{'  <-' if row.scheme == plan.pick else ''}"
        lines.append((name, step, f"{row.waits_ms:,.1f}", f"{row.bytes_out / 1e6:,.3f}", factor, seconds))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return [*text, "* predicted, not tried; x steps: against bf16, median and range of this project's own records"]
