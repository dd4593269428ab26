"""Schedules of density: the share of entries that may go at a step; 1 means a dense step."""

import math
from dataclasses import dataclass
from typing import ClassVar

from laconic.errors import SchemeError

_STAGE_FACTOR = 0.25


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """The frozen answer to *when*."""

    of_what: ClassVar[tuple[str, ...]]  # the vectors whose exchange it times: gradients, models or drift


@dataclass(frozen=True, kw_only=True)
class Schedule(Trigger):
    """A density for each step: a pure function, so all workers agree on it without a message."""

    of_what: ClassVar[tuple[str, ...]] = ("gradients",)
    thins_out: ClassVar[bool] = False  # whether it lowers the share that is sent step by step

    def density(self, step: int, target: float) -> float:
        """The share of entries that goes at `step` (from 0) when the selector aims at `target`."""
        return target


class ByClock:
    """An exchange every `steps` steps, whatever has changed; of the whole model where models gossip."""

    steps: float

    per = "model"
    measure = None  # no measurement of how far a model has moved decides

    def exchanges(self, step: int, gap: int, phase: float) -> bool:
        """Whether a group is exchanged, `gap` steps after its last time; a worker's own `phase` is in [0, 1)."""
        return math.floor((step + 1) / self.steps + phase) > math.floor(step / self.steps + phase)

    def pair_rounds(self, step: int) -> range:
        """The rounds of pairs, by number, that come with this step by the clock that all workers share."""
        return range(math.floor(step / self.steps), math.floor((step + 1) / self.steps))

    def messages_per_step(self, per_exchange: float, per_model: float) -> float:
        """The messages that leave a worker: `per_exchange` each time, each 1/`per_model` of a model; NaN: not known."""
        return per_exchange / self.steps


@dataclass(frozen=True, kw_only=True)
class EveryStep(ByClock, Schedule):
    """The same share at every step; in gossip an exchange at each."""

    of_what = ("gradients", "models")
    steps = 1.0


@dataclass(frozen=True, kw_only=True)
class WarmUp(Schedule):
    """The first `steps` steps go dense, while the network changes fastest."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SchemeError(f"WarmUp.steps is {self.steps}; give 1 or more, or use EveryStep()")

    def density(self, step: int, target: float) -> float:
        return 1.0 if step < self.steps else target


@dataclass(frozen=True, kw_only=True)
class Ramp(Schedule):
    """25 %, 6.25 %, 1.6 %, 0.4 %, ... for `steps` steps each, down to the target (Lin et al., ICLR 2018)."""

    thins_out = True

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SchemeError(f"Ramp.steps is {self.steps}; give the steps of one stage, 1 or more")

    def density(self, step: int, target: float) -> float:
        return max(target, _STAGE_FACTOR ** (step // self.steps + 1))
