"""When a worker of a gossip exchanges its model: by the clock, or by how far the model has moved.

Distances are squares: change_k = ||x_k - last_k||^2 and size_k = ||last_k||^2 of a tensor group k with n_k entries,
where last_k is the group after its last exchange; `lr_ratio` is the learning rate over its largest so far.
"""

import math
from dataclasses import dataclass
from typing import Self

from laconic.errors import SchemeError
from laconic.trigger.schedule import ByClock, EveryStep, Trigger

_PER = ("model", "tensor")
_GAIN = 4.0  # one model sent multiplies a moving threshold by this; 16 was no better
_FIRST_THRESHOLD = 4.0  # a moving threshold begins at this multiple of the first step's mean change, over the rate
_PAYBACK = 0.25  # of the rate: how much of the models sent ahead of it counts as sent anew at each step
_LEAST_LR_RATIO = 1e-3  # a schedule that ends at zero would let everything be exchanged in its last step


@dataclass(frozen=True, kw_only=True)
class Period(ByClock, Trigger):
    """Every `steps` steps, whatever has changed.

    A worker's first exchange is drawn, so that not all send at once; those who gossip in pairs have theirs together.
    """

    of_what = ("models",)

    steps: float

    def __post_init__(self) -> None:
        if not 0.1 <= self.steps < math.inf:
            raise SchemeError(f"Period.steps is {self.steps}; give 1 or more, or in pairs 0.1 or more")


@dataclass(frozen=True, kw_only=True)
class ChangeTrigger(Trigger):
    """What bounds a trigger that measures the model: the groups it is cut into, and the gaps between exchanges."""

    of_what = ("models",)

    per: str = "model"  # what is exchanged on its own: the model, or each tensor
    shortest: int = 1  # steps between two exchanges of a group at least
    longest: int = 200  # and at most
    warmup: int = 0  # steps at the start, in each of which everything is exchanged

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.per not in _PER:
            raise SchemeError(f"{name}.per is {self.per!r}; give {' or '.join(_PER)}")
        if not 1 <= self.shortest <= self.longest:
            raise SchemeError(
                f"{name} has shortest={self.shortest} and longest={self.longest}; give 1 <= shortest <= longest"
            )
        if self.warmup < 0:
            raise SchemeError(f"{name}.warmup is {self.warmup}; give 0 or more steps")

    @property
    def measure(self) -> Self:
        return self

    @property
    def moving(self) -> "TargetRate | None":
        """This trigger, if its threshold follows what is sent."""
        return None

    def exchanges(self, step: int, gap: int, phase: float) -> bool | None:
        """Whether a group is exchanged, `gap` steps after its last time; None: its trigger score decides."""
        if step < self.warmup or gap >= self.longest:
            return True
        return False if gap < self.shortest else None

    def pair_rounds(self, step: int) -> range:
        return range(step, step + 1)


@dataclass(frozen=True, kw_only=True)
class Change(ChangeTrigger):
    """||x - last|| > threshold * lr_ratio * ||last||: the model has moved enough (after Ho, Wu, Liu, CCGRID 2018).

    A constant threshold would end all exchanges as the learning rate falls and leave the replicas unequal, hence
    lr_ratio (ours).
    """

    threshold: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold > 0:
            raise SchemeError(f"Change.threshold is {self.threshold}; give a relative change above 0")

    def trigger_score(self, change: float, size: float, num_entries: int, lr_ratio: float) -> float:
        """(||x - last|| / (lr_ratio * ||last||))^2."""
        return change / max(size, 1e-30) / _floor(lr_ratio)

    @property
    def score_threshold(self) -> float:
        """The trigger score above which a group is exchanged."""
        return self.threshold**2

    def messages_per_step(self, per_exchange: float, per_model: float) -> float:
        return math.nan


@dataclass(frozen=True, kw_only=True)
class TargetRate(ChangeTrigger):
    """change_k / n_k^1.5 > t * lr_ratio^2, the threshold t moving so that `rate` models leave a worker per step (ours).

    An exchange of a group takes about change_k of disagreement away and costs n_k entries, so those groups go in which
    an entry sent does most; small tensors weigh more than their entries, hence 1.5. t *= 4^(sent - rate + rate*ahead/4)
    where ahead is the sum of sent - rate so far, so that what a start or a burst has overspent is saved again; t rises
    with the square of a learning rate that warms up.
    """

    score_threshold = None  # found by the first measurement

    @property
    def moving(self) -> Self:
        return self

    per: str = "tensor"
    rate: float = 0.12

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate <= 2:
            raise SchemeError(f"TargetRate.rate is {self.rate}; give models sent per step and worker, in (0, 2]")

    def trigger_score(self, change: float, size: float, num_entries: int, lr_ratio: float) -> float:
        """change_k / (n_k^1.5 * lr_ratio^2)."""
        return change / (num_entries * math.sqrt(num_entries)) / _floor(lr_ratio)

    def first_threshold(self, mean_score: float) -> float:
        """The threshold to begin with, where the first step's scores had this mean."""
        return _FIRST_THRESHOLD * mean_score / min(1.0, self.rate)

    def next_threshold(self, threshold: float, share_sent: float, ahead: float) -> float:
        """The threshold after a step in which this worker sent `share_sent` models, in requests or replies.

        `ahead` is how many more models than `rate` a step it has sent in all.
        """
        moved = threshold * math.pow(_GAIN, share_sent - self.rate + _PAYBACK * self.rate * ahead)
        return min(max(moved, 1e-60), 1e60)  # so that it comes back from where a rate could not be met

    def messages_per_step(self, per_exchange: float, per_model: float) -> float:
        return self.rate * per_model


GossipTrigger = EveryStep | Period | Change | TargetRate


def _floor(lr_ratio: float) -> float:
    return max(lr_ratio, _LEAST_LR_RATIO) ** 2
