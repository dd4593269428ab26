"""The frozen scheme of models that train apart and agree now and then: what is exchanged, when, and then what."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from laconic.errors import SchemeError
from laconic.exchange import Pattern
from laconic.outer import Outer, OuterSGD
from laconic.scheme.scheme import Scheme, SchemeBase
from laconic.trigger import EveryStep, Rounds, WarmUp


@dataclass(frozen=True, kw_only=True)
class OuterScheme(SchemeBase):
    """A worker's drift since all agreed: how it is exchanged, when, and how the anchor moves by the mean.

    The schedule of `exchanged` follows from `when`, whose warm-up sends drifts whole: another one is overwritten.
    """

    of_what: ClassVar[Literal["drift"]] = "drift"
    is_torch_hook: ClassVar[Literal[False]] = False

    exchanged: Scheme = Scheme()
    when: Rounds = Rounds()
    then: Outer = OuterSGD()

    def __post_init__(self) -> None:
        exchanged, when = self.exchanged, self.when
        if "drift" not in when.of_what:
            name = type(when).__name__
            raise SchemeError(f"outer steps come in rounds, and {name} is none; use trigger=Rounds(every=16)")
        if self.exchange.votes or not self.talks:
            name = type(self.exchange).__name__
            raise SchemeError(f"outer steps need the mean of all drifts, not {name}; use AllReduce() or AllGather()")
        if when.mix is not None and (not when.delay or exchanged.memory.kinds):
            raise SchemeError("mix is for delayed results, of drifts of which nothing is kept; leave it out")
        if exchanged.memory.momentum:
            raise SchemeError("the outer step has the momentum, so the memory must have none; use Residual()")
        if exchanged.select.takes_turns and when.fragments > 1:
            name = type(exchanged.select).__name__
            raise SchemeError(f"{name} and fragments would take turns at once; use fragments=1")
        name = type(self.then).__name__
        if self.exchange.in_pairs and not self.then.pulls:
            raise SchemeError(f"in pairs anchors differ, and {name} lets them drift apart; use outer=PairMomentum()")
        if self.then.pulls and not self.exchange.in_pairs:
            raise SchemeError(f"{name} pulls two anchors together, which Pairs leave apart; use exchange=Pairs()")
        num_dense = 0 if exchanged.select.sends_all else when.warmup * when.fragments  # exchanges: steps of a session
        trigger = WarmUp(steps=num_dense) if num_dense else EveryStep()
        object.__setattr__(self, "exchanged", replace(exchanged, trigger=trigger))

    @property
    def exchange(self) -> Pattern:  # type: ignore[override]
        return self.exchanged.exchange

    @property
    def answers(self) -> dict[str, Any]:
        return {**self.exchanged.answers, "trigger": self.when, "outer": self.then}
