"""When workers that train apart agree: after so many steps, a fragment of the model at a time, waiting or not."""

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.errors import SchemeError
from laconic.trigger.schedule import Trigger


@dataclass(frozen=True, kw_only=True)
class Rounds(Trigger):
    """Each fragment of the model goes every `every` steps, and its result is applied `delay` steps later.

    Fragments go every/fragments steps apart, so that the link is busy evenly (Streaming DiLoCo, Douillard et al.,
    2501.18512). A delayed result moves a model by what all agreed on, and keeps what it learned meanwhile:
    x += anchor - x as sent (ours); with `mix` x = mix*x + (1-mix)*anchor instead (theirs).
    """

    of_what = ("drift",)

    every: int = 16
    fragments: int = 1
    delay: int = 0  # steps in the background; 0: everybody waits
    mix: float | None = None  # what of itself a model keeps; None: what it learned meanwhile
    warmup: int = 0  # steps at the start, after each of which all models become their mean, and everybody waits

    def __post_init__(self) -> None:
        if self.every < 1:
            raise SchemeError(f"Rounds.every is {self.every}; give the steps between two rounds, 1 or more")
        if not 1 <= self.fragments <= self.every:
            raise SchemeError(f"Rounds.fragments is {self.fragments}; give 1 to every, {self.every}")
        if not 0 <= self.delay <= self.every:
            raise SchemeError(f"Rounds.delay is {self.delay}; give 0 to every, {self.every}: one round at a time")
        if self.mix is not None and not 0 <= self.mix < 1:
            raise SchemeError(f"Rounds.mix is {self.mix}; give a share in [0, 1), or leave it out")
        if self.warmup < 0:
            raise SchemeError(f"Rounds.warmup is {self.warmup}; give 0 or more steps")

    def fragments_due(self, steps: int) -> Sequence[int]:
        """The fragments that go after so many steps; the last one ends a period."""
        if steps <= self.warmup:
            return range(self.fragments)
        place = (steps - self.warmup - 1) % self.every + 1
        return [f for f in range(self.fragments) if (f + 1) * self.every // self.fragments == place]

    def delay_at(self, steps: int) -> int:
        """How many steps later the result of what goes after so many steps is applied."""
        return 0 if steps <= self.warmup else self.delay
