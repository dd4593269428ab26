"""The measures that a run is judged by, and the figures that only some runs have, each declared once.

A new figure is an entry of FIGURES: where it is found, how rounds combine, how it is shown. Results, rows, the table
and the page carry and show whatever is declared and there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar

T = TypeVar("T", bound="Record")
Values = dict[str, float | None]


class Source(Enum):
    """The source of a figure at the end of a run."""

    STATS = "the stats of the worker that leads"
    EVALUATION = "the last evaluation"
    WORKERS = "what the workers told each other"
    SERVERS = "the sum over dedicated servers"
    COMPARISON = "worked out from the records of all rounds"


class Place(Enum):
    """The place of a column."""

    BYTES = "beside the bytes"
    END = "at the end"
    NONE = "in no table"


def first(values: Sequence[float | None]) -> float | None:
    """The value of the first round, for what is the same in all."""
    return values[0]


def median(values: Sequence[float | None]) -> float | None:
    """The median where all rounds have a value; what some round does not have, none has."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def in_no_row(values: Sequence[float | None]) -> float | None:
    """A comparison does without it."""
    return None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure; `name` is its key in every record."""

    name: str
    meaning: str
    source: Source
    key: str = ""  # its name there, where that is another
    over_rounds: Callable[[Sequence[float | None]], float | None] = in_no_row
    per_step: bool = False  # whether a row divides it by the steps of the run
    rather: str = ""  # the figure that a row tells in its place, where there is one
    place: Place = Place.NONE
    head: str = ""
    form: str = ""
    unit: str = ""
    factor: float = 1.0  # from what is recorded to what is shown
    shown_with: str = ""  # the figure whose column brings this one's; its own where none is named
    sentence: str = ""  # how the line about a run tells it

    def shown(self, value: float | None) -> str:
        """As a cell of a table; - where there is none."""
        return "-" if value is None else f"{self.factor * value:{self.form}}{self.unit}"


FIGURES = (
    Figure(
        name="link_bytes_out", meaning="bytes_out, as the network interface saw it; none on loopback",
        source=Source.WORKERS, over_rounds=first, per_step=True, place=Place.BYTES, head="on the link", form=",.0f",
    ),
    Figure(
        name="link_bytes_in", meaning="bytes_in, as the network interface saw it", source=Source.WORKERS,
        over_rounds=first, per_step=True,
    ),
    Figure(
        name="link_use", meaning="share of the link's rate used while exchanging", source=Source.COMPARISON,
        place=Place.BYTES, head="link use", form=".0f", unit=" %", factor=100, shown_with="link_bytes_out",
    ),
    Figure(
        name="mean_step_ms", meaning="of all steps, where step_ms is their median", source=Source.WORKERS,
        over_rounds=median, place=Place.END, head="mean ms", form=".1f", shown_with="waited_s",
    ),
    Figure(
        name="waited_s", meaning="what training waited for results of outer steps that were due, all steps",
        source=Source.STATS, over_rounds=median, place=Place.END, head="waited s", form=".2f",
        sentence="{:.2f} s waiting for results",
    ),
    Figure(
        name="tokens_per_s", meaning="tokens that all workers together see in a second, by the median step",
        source=Source.WORKERS, over_rounds=median, place=Place.END, head="tokens/s", form=",.0f",
        sentence="{:,.0f} tokens/s",
    ),
    Figure(
        name="peak_memory_bytes",
        meaning="most that PyTorch allocated at once on a GPU while training, on the worker that took most",
        source=Source.WORKERS, over_rounds=median, place=Place.END, head="peak MB", form=",.0f", factor=1e-6,
        sentence="{:,} bytes of GPU memory at the peak",
    ),
    Figure(
        name="seconds_slowest", meaning="of the worker that took longest", source=Source.WORKERS,
    ),
    Figure(
        name="worst_accuracy", meaning="of gossip's replicas, of which `accuracy` is the mean's",
        source=Source.EVALUATION, over_rounds=median, place=Place.END, head="worst replica", form=".2f", unit=" %",
        factor=100,
    ),
    Figure(
        name="worst_loss",
        meaning="of gossip's replicas, of which `loss` is the mean's, where a task is judged by that",
        source=Source.EVALUATION, over_rounds=median, place=Place.END, head="worst replica", form=".4f",
    ),
    Figure(
        name="consensus_distance",
        meaning="||x_i - mean|| / ||mean|| of gossip's replicas, root mean square, before the last average",
        source=Source.EVALUATION, over_rounds=median, place=Place.END, head="apart", form=".2f", unit=" %",
        factor=100,
    ),
    Figure(
        name="union", meaning="|U|/k at a server, over all steps since the last resume", source=Source.STATS,
        over_rounds=first, place=Place.BYTES, head="|U|/k", form=".2f", sentence="|U|/k {:.2f}",
    ),
    Figure(
        name="oldest_residual", meaning="the most steps that an unsent entry has waited",
        source=Source.STATS,
    ),
    Figure(
        name="never_sent", meaning="share of entries that the leading worker has never sent", source=Source.STATS,
    ),
    Figure(
        name="server_bytes_out", meaning="of all dedicated servers, all steps since the last resume",
        source=Source.SERVERS, key="bytes_out", over_rounds=first, per_step=True, rather="server_link_bytes_out",
        place=Place.BYTES, head="servers out/step", form=",.0f", sentence="{:,} bytes out of servers",
    ),
    Figure(
        name="server_link_bytes_out",
        meaning="what the interfaces of servers saw, evaluation and checkpoints included", source=Source.SERVERS,
        key="link_bytes_out",
    ),
    Figure(
        name="server_held_bytes", meaning="what dedicated servers keep between steps", source=Source.SERVERS,
        key="held_bytes",
    ),
)  # fmt: skip


class Record:
    """A record: what every run has, as fields, and in `figures` what only some have; flat on disk."""

    noun: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """As plain values, under the names that records have."""
        values = asdict(self)  # type: ignore[call-overload]  # every record is a dataclass
        figures = values.pop("figures")
        return {**values, **figures}

    @classmethod
    def of(cls: type[T], fact: Mapping[str, Any]) -> T:
        """From a fact on disk; what the class does not name is ignored."""
        figures = {figure.name: fact.get(figure.name) for figure in FIGURES}
        return cls(**pick(cls, {**fact, "figures": figures}, cls.noun))


def pick(kind: type, fact: Mapping[str, Any], noun: str) -> dict[str, Any]:
    """The fields of a fact that a dataclass names; an error where it needs one that is not there."""
    for field in fields(kind):
        if field.name not in fact and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"a {noun} lacks {field.name}")
    return {field.name: fact[field.name] for field in fields(kind) if field.name in fact}


def of_run(known: Mapping[Source, Mapping[str, Any]], servers: Sequence[Mapping[str, Any]]) -> Values:
    """Every figure of one run, None where it has none."""
    totals = {key: [server[key] for server in servers if server.get(key) is not None] for key in _SERVER_KEYS}
    summed = {key: sum(values) if values else None for key, values in totals.items()}
    everything = {**known, Source.SERVERS: summed}
    return {f.name: everything[f.source].get(f.key or f.name) for f in FIGURES if f.source in everything}


def of_rounds(results: Sequence[Mapping[str, Any]], steps: int) -> Values:
    """Every figure of a comparison's row, from the results of one scheme's rounds."""
    combined: Values = {}
    for figure in FIGURES:
        if figure.over_rounds is not in_no_row:
            value = figure.over_rounds([result.get(figure.rather) or result.get(figure.name) for result in results])
            combined[figure.name] = round(value / steps) if figure.per_step and value is not None else value
    return combined


def columns(rows: Sequence[Values], place: Place) -> list[Figure]:
    """The figures to show at a place: those that some row has, and those that come with them."""
    present = {name for values in rows for name, value in values.items() if value is not None}
    return [figure for figure in FIGURES if figure.place is place and (figure.shown_with or figure.name) in present]


def sentences(values: Mapping[str, Any]) -> list[str]:
    """The figures that a line about a run names."""
    return [f.sentence.format(values[f.name]) for f in FIGURES if f.sentence and values.get(f.name) is not None]


_SERVER_KEYS = [figure.key for figure in FIGURES if figure.source is Source.SERVERS]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One way to judge a model; `name` is its key in evaluations, results and rows."""

    name: str
    noun: str  # in sentences
    best: Callable[[list[float]], float]
    worst: Callable[[list[float]], float]
    target: Callable[[float], float]  # that a reference's final value sets for all
    factor: float = 1.0  # from what is recorded to what is shown
    form: str
    unit: str = ""

    def reaches(self, value: float | None, target: float) -> bool:
        """Return whether a value is as good as the target; what is no number is not."""
        return value is not None and self.best([value, target]) == value

    def text(self, value: float | None) -> str:
        """A value as it is shown; - where there is none."""
        return "-" if value is None else f"{self.factor * value:{self.form}}{self.unit}"

    def brief(self, value: float) -> str:
        """The value with no more digits than it needs; it never breaks before the unit."""
        return f"{self.factor * value:.4g}{self.unit}".replace(" ", "\N{NO-BREAK SPACE}")


MEASURES = {
    "accuracy": Measure(
        name="accuracy", noun="accuracy", best=max, worst=min, target=lambda reference: reference - 0.01,
        factor=100, form=".2f", unit=" %",
    ),
    "loss": Measure(
        name="loss", noun="validation loss", best=min, worst=max, target=lambda reference: 1.02 * reference, form=".4f",
    ),
}  # fmt: skip
