"""The frozen scheme of models that gossip: four answers, since what a worker keeps is its own model."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from laconic.errors import SchemeError
from laconic.exchange import Gossip
from laconic.layout import Layout, halves_of
from laconic.quantize import Exact, FloatCode, ModuloCode, Quantizer, is_modulo_code
from laconic.scheme.parts import read_parts
from laconic.scheme.scheme import SchemeBase
from laconic.select import Chooser, Everything
from laconic.transport import QUESTION_HEAD_BYTES, ring_bytes
from laconic.trigger import EveryStep, GossipTrigger
from laconic.wire import CodesShape


@dataclass(frozen=True, kw_only=True)
class GossipScheme(SchemeBase):
    """What is sent of a model, how it is written, to whom it goes, and when."""

    of_what: ClassVar[Literal["models"]] = "models"
    is_torch_hook: ClassVar[Literal[False]] = False

    select: Chooser = Everything()
    quantize: Quantizer | ModuloCode = Exact()
    exchange: Gossip = Gossip()
    trigger: GossipTrigger = EveryStep()

    def __post_init__(self) -> None:
        read_parts(self)
        name = type(self.trigger).__name__
        if self.exchange.of_what != "models":
            where = type(self.exchange).__name__
            raise SchemeError(f"{where} is for {self.exchange.of_what}, and gossip sends models; use Gossip()")
        if self.select.is_shared and self.selects:
            name = type(self.select).__name__
            raise SchemeError(f"{name} sends what a network can add, position by position; use AllReduce()")
        if self.select.needs_owners:
            raise SchemeError("Overlap makes unions small, which only a server's answer gains by; use Server()")
        if "models" not in self.trigger.of_what:
            raise SchemeError(f"{name} says how much of a gradient goes, and gossip sends models; use TargetRate()")
        if not isinstance(self.quantize, FloatCode | ModuloCode):
            raise SchemeError(f"{type(self.quantize).__name__} is for gradients, and gossip sends models; use BF16()")
        paired = self.exchange.mode == "paired"
        if paired and self.trigger.measure is not None:
            raise SchemeError(f"pairs meet by the clock, and {name} is none; use Period(), or Gossip(mode='free')")
        if not paired and self.trigger.pair_rounds(0).stop > 1:
            raise SchemeError("only pairs meet more than once a step; use Gossip(mode='paired'), or Period(steps=1)")
        sends_modulo_codes = is_modulo_code(self.quantize)
        if self.selects and sends_modulo_codes:
            raise SchemeError("modulo codes are of the whole model; use BF16() where entries are selected")
        if (self.selects or sends_modulo_codes) and self.trigger.per != "model":
            raise SchemeError(f"messages are of the whole model, which is exchanged as one; use {name}(per='model')")

    @property
    def selects(self) -> bool:
        """Whether only some entries go at a time."""
        return not self.select.sends_all

    def bytes_out(self, layout: Layout, num_workers: int) -> int:
        """Bytes that leave one worker for a model of this layout per step, with its replies; not known under Change."""
        plan = self.select.plan(layout, self.select.density_among(num_workers))
        request_code = self.quantize
        reply_code = request_code.answer if is_modulo_code(request_code) else request_code
        count = plan.num_fixed + plan.k
        mode = self.exchange.mode
        paired = 1 - num_workers % 2 / num_workers  # the share of workers that have a partner in a round
        messages = self.trigger.messages_per_step(
            paired if mode in ("matched", "paired") else 2, plan.num_entries / count
        )
        if math.isnan(messages):
            raise SchemeError(f"what {self} sends depends on how its models change; measure it")
        parts = [(plan.num_entries, plan.k, plan.num_fixed)]
        if mode == "paired" and not self.selects:  # each of the two asks about one half
            parts = [(stop - start, stop - start, 0) for start, stop in halves_of(count)]
        head = 0 if mode == "matched" else QUESTION_HEAD_BYTES
        requests = sum(head + CodesShape(n, k, fixed, request_code).num_bytes for n, k, fixed in parts)
        replies = sum(CodesShape(fixed + k, fixed + k, 0, reply_code).num_bytes for _, k, fixed in parts)
        return round(messages * (requests + replies) / 2)

    def bits_per_entry(self, layout: Layout, num_workers: int) -> float:
        """Bits that each entry of such a model would take in an all-reduce for as many bytes."""
        return 32 * self.bytes_out(layout, num_workers) / ring_bytes(4 * layout.num_entries, num_workers)
