"""The frozen scheme of models that train alone and agree now and then: the five answers, and what comes of it."""

from dataclasses import dataclass
from functools import cached_property

from laconic.errors import SchemeError
from laconic.exchange import AllReduce, Pattern
from laconic.memory import Memory, Nothing
from laconic.quantize import Exact, Grid, Quantizer
from laconic.scheme.base import SchemeBase
from laconic.scheme.scheme import Scheme
from laconic.select import Everything, Selector
from laconic.trigger import EveryStep, Outer, OuterSGD, Rounds, WarmUp


@dataclass(frozen=True, kw_only=True)
class OuterScheme(SchemeBase):
    """Of a worker's drift since all agreed: what is sent, how, what is kept, where it goes, when, and then what."""

    select: Selector = Everything()
    quantize: Quantizer | Grid = Exact()
    memory: Memory = Nothing()
    exchange: Pattern = AllReduce()
    trigger: Rounds = Rounds()
    outer: Outer = OuterSGD()

    def __post_init__(self) -> None:
        if not self.trigger.in_rounds:
            name = type(self.trigger).__name__
            raise SchemeError(f"outer steps come in rounds, and {name} is none; use trigger=Rounds(every=16)")
        if self.exchange.of_what != "gradients" or self.exchange.votes or not self.talks:
            name = type(self.exchange).__name__
            raise SchemeError(f"outer steps need the mean of all drifts, not {name}; use AllReduce() or AllGather()")
        if self.select.takes_turns and self.trigger.fragments > 1:
            name = type(self.select).__name__
            raise SchemeError(f"{name} and fragments would take turns at once; use fragments=1")
        _ = self.said

    @property
    def of_what(self) -> str:
        return "drift"

    @cached_property
    def said(self) -> Scheme:
        """How a drift is said, as if it were a gradient."""
        warm_up = self.trigger.warmup * self.trigger.fragments  # turns, each of them a step of the session
        return Scheme(
            select=self.select,
            quantize=self.quantize,
            memory=self.memory,
            exchange=self.exchange,
            trigger=WarmUp(steps=warm_up) if warm_up and self.select.density < 1 else EveryStep(),
        )
