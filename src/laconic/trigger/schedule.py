"""Schedules of density: the share of entries that may go at a step; 1 means a dense step."""

import math
from dataclasses import dataclass

from laconic.errors import SchemeError

_STAGE_FACTOR = 0.25


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """The frozen answer to *when*; a pure function of the step, so all workers agree without a word."""

    thins_out = False  # whether it lowers the share that is sent step by step
    in_rounds = False  # whether it says when models that train alone agree

    def density(self, step: int, target: float) -> float:
        """The share of entries that goes at `step` (from 0) when the selector aims at `target`."""
        return target


class ByClock:
    """When a worker of a gossip speaks whatever has changed: every `steps` steps, by the clock."""

    steps: float

    per = "model"  # what speaks on its own
    measure = None  # what says how far a group has moved, where that decides

    def speaks(self, step: int, gap: int, phase: float) -> bool:
        """Whether a group speaks, `gap` steps after its last exchange; a worker's own `phase` is in [0, 1)."""
        return math.floor((step + 1) / self.steps + phase) > math.floor(step / self.steps + phase)

    def turns(self, step: int) -> range:
        """The turns, by number, that come with this step by the clock that all workers share."""
        return range(math.floor(step / self.steps), math.floor((step + 1) / self.steps))

    def messages_per_step(self, per_turn: float, per_model: float) -> float:
        """What leaves a worker, of `per_turn` messages at a turn, each 1/`per_model` of a model; NaN: not known."""
        return per_turn / self.steps


@dataclass(frozen=True, kw_only=True)
class EveryStep(ByClock, Trigger):
    """The same share at every step; in gossip a worker speaks at each."""

    steps = 1.0


@dataclass(frozen=True, kw_only=True)
class WarmUp(Trigger):
    """The first `steps` steps go dense, while the network changes fastest."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SchemeError(f"WarmUp.steps is {self.steps}; give 1 or more, or use EveryStep()")

    def density(self, step: int, target: float) -> float:
        return 1.0 if step < self.steps else target


@dataclass(frozen=True, kw_only=True)
class Ramp(Trigger):
    """25 %, 6.25 %, 1.6 %, 0.4 %, ... for `steps` steps each, down to the target (Lin et al., ICLR 2018)."""

    thins_out = True

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SchemeError(f"Ramp.steps is {self.steps}; give the steps of one stage, 1 or more")

    def density(self, step: int, target: float) -> float:
        return max(target, _STAGE_FACTOR ** (step // self.steps + 1))
