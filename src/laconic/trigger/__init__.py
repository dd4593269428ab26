"""When it goes: how much may be sent at a given step, or whether a worker exchanges at all."""

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
