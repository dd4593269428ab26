"""When it goes: one table for each contract, since gradients, models and drifts ask different questions."""

from laconic.trigger.gossip import Change, GossipTrigger, Period, TargetRate
from laconic.trigger.rounds import Rounds
from laconic.trigger.schedule import EveryStep, Ramp, Schedule, Trigger, WarmUp

SCHEDULES: dict[str, type[Schedule]] = {"every-step": EveryStep, "warm-up": WarmUp, "ramp": Ramp}
GOSSIP_TRIGGERS: dict[str, type[Trigger]] = {
    "every-step": EveryStep,
    "period": Period,
    "change": Change,
    "target-rate": TargetRate,
}
ROUNDS: dict[str, type[Rounds]] = {"rounds": Rounds}
