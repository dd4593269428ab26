"""The frozen scheme of models that gossip: four answers, since what a worker keeps is its own model."""

import math
from dataclasses import dataclass

from laconic.errors import SchemeError
from laconic.exchange import Gossip
from laconic.layout import Layout, halves_of
from laconic.quantize import Exact, FloatCode, ModuloCode, Quantizer, is_modulo_code
from laconic.scheme.base import SchemeBase
from laconic.scheme.parts import read_parts
from laconic.select import Chooser, Everything
from laconic.transport import QUESTION_HEAD_BYTES, ring_bytes
from laconic.trigger import EveryStep, Period, Speech
from laconic.wire import CodesShape


@dataclass(frozen=True, kw_only=True)
class GossipScheme(SchemeBase):
    """What is sent of a model, how it is written, to whom it goes, and when."""

    select: Chooser = Everything()
    quantize: Quantizer | ModuloCode = Exact()
    exchange: Gossip = Gossip()
    trigger: EveryStep | Speech = EveryStep()

    def __post_init__(self) -> None:
        read_parts(self)
        name = type(self.trigger).__name__
        if self.of_what != "models":
            where = type(self.exchange).__name__
            raise SchemeError(f"{where} is for {self.of_what}, and gossip sends models; use Gossip()")
        if self.select.is_shared and self.chooses:
            name = type(self.select).__name__
            raise SchemeError(f"{name} sends what a network can add, position by position; use AllReduce()")
        if self.select.needs_owners:
            raise SchemeError("Overlap makes unions small, which only a server's answer gains by; use Server()")
        if not isinstance(self.trigger, EveryStep | Speech):
            raise SchemeError(f"{name} says how much of a gradient goes, and gossip sends models; use TargetRate()")
        if not isinstance(self.quantize, FloatCode | ModuloCode):
            raise SchemeError(f"{type(self.quantize).__name__} is for gradients, and gossip sends models; use BF16()")
        paired = self.exchange.mode == "paired"
        if paired and self.trigger.measure is not None:
            raise SchemeError(f"pairs meet by the clock, and {name} is none; use Period(), or Gossip(mode='free')")
        if not paired and isinstance(self.trigger, Period) and self.trigger.steps < 1:
            raise SchemeError("only pairs meet more than once a step; use Gossip(mode='paired'), or Period(steps=1)")
        tells_remainders = is_modulo_code(self.quantize)
        if self.chooses and tells_remainders:
            raise SchemeError("remainders are told of the whole model; use BF16() where entries are chosen")
        if (self.chooses or tells_remainders) and self.trigger.per != "model":
            raise SchemeError(f"what is said is of the whole model, so it speaks as one; use {name}(per='model')")

    @property
    def chooses(self) -> bool:
        """Whether only some entries go at a time."""
        return self.select.density < 1

    def bytes_out(self, layout: Layout, num_workers: int) -> int:
        """What leaves one worker for a model of this layout per step, asked and answering; not known under Change."""
        plan = self.select.plan(layout, self.select.density_among(num_workers))
        asked = self.quantize
        told = asked.answer if is_modulo_code(asked) else asked
        count = plan.num_fixed + plan.k
        mode = self.exchange.mode
        paired = 1 - num_workers % 2 / num_workers  # the share of workers that have a partner at a turn
        messages = self.trigger.messages_per_step(
            paired if mode in ("matched", "paired") else 2, plan.num_entries / count
        )
        if math.isnan(messages):
            raise SchemeError(f"what {self} sends depends on how its models change; measure it")
        parts = [(plan.num_entries, plan.k, plan.num_fixed)]
        if mode == "paired" and not self.chooses:  # each of the two asks about one half
            parts = [(stop - start, stop - start, 0) for start, stop in halves_of(count)]
        head = 0 if mode == "matched" else QUESTION_HEAD_BYTES
        questions = sum(head + CodesShape(n, k, fixed, asked).num_bytes for n, k, fixed in parts)
        answers = sum(CodesShape(fixed + k, fixed + k, 0, told).num_bytes for _, k, fixed in parts)
        return round(messages * (questions + answers) / 2)

    def bits_per_entry(self, layout: Layout, num_workers: int) -> float:
        """Bits that each entry of such a model would take in an all-reduce for as many bytes."""
        return 32 * self.bytes_out(layout, num_workers) / ring_bytes(4 * layout.num_entries, num_workers)
