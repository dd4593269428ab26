"""What a run is judged by, on examples that it was not trained on: accuracy or loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
        """Whether a value is as good as the target; what is no number is not."""
        return value is not None and self.best([value, target]) == value

    def text(self, value: float | None) -> str:
        """A value as it is shown; - where there is none."""
        return "-" if value is None else f"{self.factor * value:{self.form}}{self.unit}"

    def brief(self, value: float) -> str:
        """With no more digits than it needs; it never breaks before the unit."""
        return f"{self.factor * value:.4g}{self.unit}".replace(" ", "\N{NO-BREAK SPACE}")


MEASURES = {
    measure.name: measure
    for measure in (
        Measure(
            name="accuracy",
            noun="accuracy",
            best=max,
            worst=min,
            target=lambda reference: reference - 0.01,
            factor=100,
            form=".2f",
            unit=" %",
        ),
        Measure(
            name="loss",
            noun="validation loss",
            best=min,
            worst=max,
            target=lambda reference: 1.02 * reference,
            form=".4f",
        ),
    )
}
