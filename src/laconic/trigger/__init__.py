"""When it goes: how much may be sent at a given step, or whether a worker speaks at all; and then what."""

from laconic.trigger.outer import Nesterov, Outer, OuterSGD, PairMomentum
from laconic.trigger.rounds import Rounds
from laconic.trigger.schedule import EveryStep, Ramp, Trigger, WarmUp
from laconic.trigger.speech import Change, Period, Speech, TargetRate

TRIGGERS: dict[str, type[Trigger]] = {
    "every-step": EveryStep,
    "warm-up": WarmUp,
    "ramp": Ramp,
    "period": Period,
    "change": Change,
    "target-rate": TargetRate,
    "rounds": Rounds,
}
OUTERS: dict[str, type[Outer]] = {"sgd": OuterSGD, "nesterov": Nesterov, "pair-momentum": PairMomentum}
