"""The frozen scheme of models that train alone and agree now and then: the five answers, and what comes of it."""

from dataclasses import dataclass
from functools import cached_property

from laconic.errors import SchemeError
from laconic.exchange import AllReduce, Pattern
from laconic.memory import Memory, Nothing
from laconic.outer import Outer, OuterSGD
from laconic.quantize import BF16, FP16, Exact, Grid, Quantizer
from laconic.scheme.base import SchemeBase
from laconic.scheme.parts import read_parts
from laconic.scheme.scheme import Scheme
from laconic.select import Everything, Selector
from laconic.trigger import EveryStep, Rounds, WarmUp

_FLOATS = (Exact(), BF16(), FP16())


@dataclass(frozen=True, kw_only=True)
class _DriftScheme(Scheme):
    """How a drift is said."""

    says_drift = True


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
        read_parts(self)
        if not self.trigger.in_rounds:
            name = type(self.trigger).__name__
            raise SchemeError(f"outer steps come in rounds, and {name} is none; use trigger=Rounds(every=16)")
        if self.exchange.of_what == "models" or self.exchange.votes or not self.talks:
            name = type(self.exchange).__name__
            raise SchemeError(f"outer steps need the mean of all drifts, not {name}; use AllReduce() or AllGather()")
        if self.trigger.mix is not None and (not self.trigger.delay or self.memory.kinds):
            raise SchemeError("mix is for results that come late, of drifts of which nothing is kept; leave it out")
        if self.memory.momentum:
            raise SchemeError("the outer step has the momentum, so the memory must have none; use Residual()")
        if self.select.takes_turns and self.trigger.fragments > 1:
            name = type(self.select).__name__
            raise SchemeError(f"{name} and fragments would take turns at once; use fragments=1")
        self._check_pairs()
        _ = self.said

    def _check_pairs(self) -> None:
        name = type(self.outer).__name__
        if self.exchange.in_pairs and not self.outer.pulls:
            raise SchemeError(f"in pairs anchors differ, and {name} lets them drift apart; use outer=PairMomentum()")
        if self.outer.pulls and not self.exchange.in_pairs:
            raise SchemeError(f"{name} pulls two anchors together, which Pairs leave apart; use exchange=Pairs()")
        says_all = self.select == Everything() and self.memory == Nothing() and self.quantize in _FLOATS
        if self.exchange.in_pairs and not says_all:
            raise SchemeError(
                "pairs tell each other everything and keep nothing; use select=Everything(), quantize=BF16(), FP16() "
                "or Exact(), and memory=Nothing()"
            )

    @property
    def of_what(self) -> str:
        return "drift"

    @cached_property
    def said(self) -> Scheme:
        """How a drift is said, as if it were a gradient."""
        warm_up = self.trigger.warmup * self.trigger.fragments  # turns, each of them a step of the session
        return _DriftScheme(
            select=self.select,
            quantize=self.quantize,
            memory=self.memory,
            exchange=self.exchange,
            trigger=WarmUp(steps=warm_up) if warm_up and self.select.density < 1 else EveryStep(),
        )
