"""When it goes: how much may be sent at a given step."""

from laconic.trigger.schedule import EveryStep, Ramp, Trigger, WarmUp

TRIGGERS: dict[str, type[Trigger]] = {"every-step": EveryStep, "warm-up": WarmUp, "ramp": Ramp}

__all__ = ["TRIGGERS", "EveryStep", "Ramp", "Trigger", "WarmUp"]
