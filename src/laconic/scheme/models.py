"""The frozen schemes of models that train apart: by drift, in outer rounds, or as models, by gossip."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from laconic.errors import SchemeError
from laconic.exchange import Gossip, Pattern
from laconic.layout import Layout, halves_of
from laconic.outer import Outer, OuterSGD
from laconic.quantize import Exact, FloatCode, ModuloCode, Quantizer, is_modulo_code
from laconic.scheme.parts import read_parts
from laconic.scheme.scheme import Scheme, SchemeBase
from laconic.select import Chooser, Everything
from laconic.transport import REQUEST_HEAD_BYTES, ring_bytes
from laconic.trigger import EveryStep, GossipTrigger, Rounds, WarmUp
from laconic.wire import CodesShape


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
        if self.selects and self.trigger.per != "model":
            raise SchemeError(f"entries are selected of the whole model, exchanged as one; use {name}(per='model')")

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
        head = 0 if mode == "matched" else REQUEST_HEAD_BYTES
        requests = sum(head + CodesShape(n, k, fixed, request_code).num_bytes for n, k, fixed in parts)
        replies = sum(CodesShape(fixed + k, fixed + k, 0, reply_code).num_bytes for _, k, fixed in parts)
        return round(messages * (requests + replies) / 2)

    def bits_per_entry(self, layout: Layout, num_workers: int) -> float:
        """Bits that each entry of such a model would take in an all-reduce for as many bytes."""
        return 32 * self.bytes_out(layout, num_workers) / ring_bytes(4 * layout.num_entries, num_workers)
