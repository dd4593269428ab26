"""The frozen half: five answers, checked together when they are composed."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import ClassVar

from laconic.errors import SchemeError
from laconic.exchange import AllGather, AllReduce, Pattern, Server, Shares, Silent
from laconic.layout import Layout
from laconic.memory import Memory, Nothing
from laconic.quantize import (
    Carrier,
    Exact,
    Grid,
    InFrames,
    Levels,
    Quantizer,
    Residue,
    Sign,
    Trits,
    carrier_for,
)
from laconic.scheme.parts import COMPOSED, PARTS, write_part
from laconic.select import Everything, Overlap, RandK, Selector
from laconic.text import write_pairs
from laconic.transport import agreement_bytes, ring_bytes
from laconic.trigger import EveryStep, Ramp, Speech, Trigger
from laconic.wire import FrameShape


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What is sent, how it is written, what is kept, where it goes, and when.

    str() gives a text that `laconic.parse` reads back: the recipe's own form, or all five answers.
    """

    select: Selector | RandK = Everything()
    quantize: Quantizer | Grid = Exact()
    memory: Memory = Nothing()
    exchange: Pattern = AllReduce()
    trigger: Trigger = EveryStep()
    # Set by a recipe; not an argument, so that dataclasses.replace() cannot carry it to another composition.
    label: str = field(default="", init=False, compare=False, repr=False)

    of_what: ClassVar[str] = "gradients"

    def __post_init__(self) -> None:
        self._check_of_gradients()
        shared = isinstance(self.select, RandK)
        if self.exchange.adds_in_flight and self.select.density < 1 and not shared:
            raise SchemeError(
                f"AllReduce adds position by position, but {type(self.select).__name__} picks other positions on every "
                "worker; use exchange=AllGather()"
            )
        if isinstance(self.exchange, Silent) and (self.select.density < 1 or self.memory.kinds):
            raise SchemeError(
                "Silent sends nothing, so nothing can be selected or kept; use Everything() and Nothing()"
            )
        if shared and not self.exchange.adds_in_flight:
            raise SchemeError("RandK picks the same positions on every worker, so they can be added; use AllReduce()")
        if isinstance(self.trigger, Ramp) and self.select.density == 1:
            raise SchemeError(
                "Ramp lowers the share that is sent, but everything is sent; use EveryStep() or TopK(rho=...)"
            )
        if self.exchange.adds_in_flight and isinstance(self.quantize, InFrames):
            name = type(self.quantize).__name__
            raise SchemeError(
                f"AllReduce adds in flight, but {name} codes cannot be added; use Server() or AllGather()"
            )
        if isinstance(self.quantize, Levels) and not self.memory.refunds:
            raise SchemeError("Levels rounds to the nearest, which is biased unless the loss is kept; use Residual()")
        if isinstance(self.select, Overlap) and not isinstance(self.exchange, Server):
            raise SchemeError("Overlap makes unions small, which only a server's answer gains by; use Server()")
        if isinstance(self.exchange, Server):
            self._check_server(self.exchange)
        if isinstance(self.quantize, Grid):
            self._check_grid(self.quantize)
        elif isinstance(self.exchange, AllReduce) and self.exchange.stages == 2:
            raise SchemeError("two stages round integer codes again, and these are none; use stages=0 or MaxNorm()")

    def _check_of_gradients(self) -> None:
        if self.exchange.of_what != self.of_what:
            raise SchemeError("Gossip exchanges models; use GossipScheme(...), or laconic.parse('gossip')")
        if isinstance(self.trigger, Speech):
            name = type(self.trigger).__name__
            raise SchemeError(f"{name} says when a worker gossips, and all workers must send together; use EveryStep()")
        if isinstance(self.quantize, Residue):
            raise SchemeError("Residue is for models that are nearly alike, which gradients are not; use Gossip()")

    def _check_server(self, server: Server) -> None:
        if server.votes and not isinstance(self.quantize, Sign):
            raise SchemeError("a vote is taken among signs; use quantize=Sign(), or Server(combine='mean')")
        if server.votes and self.memory.refunds:
            raise SchemeError("a vote has no size, so its rounding cannot be kept; use Accumulated() or Nothing()")
        if server.votes and self.trigger.density(0, 0.5) >= 1:
            raise SchemeError("a dense step and a vote are not of one size; use EveryStep() or Ramp()")
        if server.down_rho and not self.memory.refunds:
            raise SchemeError("Server.down_rho makes owners keep things, so must the workers; use memory=Residual()")

    @property
    def talks(self) -> bool:
        """Whether anything is sent at all."""
        return self.exchange.talks

    @property
    def has_owners(self) -> bool:
        """Whether entries have owners who answer for them, and who may be servers."""
        return self.exchange.has_owners

    @property
    def holds(self) -> bool:
        """Whether the owners of a server hold something from step to step: what their answers round away or omit."""
        server = self.exchange
        if not isinstance(server, Server) or server.votes or not self.memory.refunds:
            return False
        return server.down_rho > 0 or not isinstance(self.quantize, Exact)

    def _check_grid(self, grid: Grid) -> None:
        name = type(grid).__name__
        if not self.exchange.adds_in_flight:
            raise SchemeError(f"{name} codes lie on a grid that all workers share, to be added; use AllReduce()")
        if grid.levels == 1 and self.memory.kinds:
            # A code of one level may be a whole norm off; kept, that makes the next norm larger, and so on.
            raise SchemeError(f"{name} of one level loses too much to be kept; use levels=2 or more, or Nothing()")

    def __str__(self) -> str:
        return self.label or f"{COMPOSED}:" + write_pairs(
            {question: write_part(question, getattr(self, question)) for question in PARTS}
        )

    def bytes_out(self, layout: Layout, num_workers: int) -> int:
        """What leaves one worker for a float32 bucket of this layout once the trigger has reached its target."""
        if isinstance(self.exchange, Silent):
            return 0
        if self.exchange.adds_in_flight:
            return self._bytes_added(layout, num_workers)
        if isinstance(self.exchange, Server):
            up, down = self.server_bytes(layout, num_workers, num_workers)
            others = num_workers - 1
            return up * others // num_workers + down * others // num_workers + 16 * others
        plan, (_, quantize) = self.select.plan(layout, self.select.density_among(num_workers)), self.frame_answers
        return (num_workers - 1) * FrameShape(plan.num_entries, plan.k, plan.num_fixed, quantize).num_bytes

    def server_bytes(self, layout: Layout, num_workers: int, num_servers: int) -> tuple[int, int]:
        """(up, down): what the parts of one worker and the answers of all owners come to, one copy of each.

        The sizes of parts and unions depend on what is chosen. This is for workers that choose independently and
        evenly, |U| = N*(1 - (1 - rho)^M): choices that have something in common come to less.
        """
        server, (select, quantize) = self.exchange, self.frame_answers
        assert isinstance(server, Server)
        plan, shares = select.plan(layout, select.density_among(num_workers)), Shares(layout, num_servers)
        fixed_names = {span.name for span in plan.fixed}
        up = down = 0
        for own in shares.layouts:
            fixed = sum(span.num_entries for span in own.spans if span.name in fixed_names)
            free, n = own.num_entries - fixed, own.num_entries
            rho = plan.k / max(1, plan.num_entries - plan.num_fixed)
            k, union = math.ceil(free * rho), math.ceil(free * (1 - (1 - rho) ** num_workers))
            if server.down_rho:
                union = min(union, max(1, round(server.down_rho * n)))
            up += FrameShape(n, k, fixed, quantize).num_bytes
            forms = [FrameShape(n, union, fixed, quantize), FrameShape(n, n, 0, quantize)]
            if server.votes:
                decided = union + math.ceil(fixed * (1 - _ties(num_workers)))
                forms = [FrameShape(n, decided, 0, quantize), FrameShape(n, n, 0, Trits())]
            down += min(form.num_bytes for form in forms)
        return up, down

    def _bytes_added(self, layout: Layout, num_workers: int) -> int:
        """What an all-reduce sends, with what the workers agree on before; two stages move as much as a ring."""
        plan = self.select.plan(layout, self.select.density_among(num_workers))
        count = plan.num_fixed + plan.k
        if not isinstance(self.quantize, Grid):
            return ring_bytes(count * self.quantize.code_dtype.itemsize, num_workers)
        norms = agreement_bytes(self.quantize.num_norms(count), 2, num_workers)
        scales = agreement_bytes(self.quantize.num_map_words(count), 4, num_workers)
        return norms + scales + ring_bytes(self.carrier(num_workers).num_bytes(count), num_workers)

    def bits_per_entry(self, layout: Layout, num_workers: int) -> float:
        """Bits that each entry of such a bucket takes in an all-reduce, or would take for as many bytes."""
        return 32 * self.bytes_out(layout, num_workers) / ring_bytes(4 * layout.num_entries, num_workers)

    def carrier(self, num_workers: int) -> Carrier:
        """The words that carry the codes of a grid among M workers; SchemeError if none is worth sending."""
        assert isinstance(self.quantize, Grid) and isinstance(self.exchange, AllReduce)
        return carrier_for(self.quantize.levels, num_workers, self.exchange.stages)

    @property
    def frame_answers(self) -> tuple[Selector, Quantizer]:
        """What is sent and how it is written, where every worker sends a frame of its own."""
        assert not isinstance(self.select, RandK) and not isinstance(self.quantize, Grid)
        return self.select, self.quantize

    def warn_if_dense_is_smaller(self, layout: Layout, num_workers: int) -> None:
        """Frames and unions grow with M; say so when a 16-bit all-reduce would move less."""
        if not isinstance(self.exchange, AllGather | Server) or num_workers < 2:
            return
        here, dense = self.bytes_out(layout, num_workers), ring_bytes(2 * layout.num_entries, num_workers)
        if here > 1.02 * dense:  # headers aside
            cure = "bf16, or a smaller rho" if isinstance(self.exchange, Server) else "bf16, a smaller rho, or a server"
            warnings.warn(
                f"{self} sends {here / dense:.1f} times the bytes of a bf16 all-reduce among {num_workers} workers; "
                f"use {cure}",
                stacklevel=3,
            )


def _ties(num_voters: int) -> float:
    """The share of entries on which M random signs have no majority."""
    return 0.0 if num_voters % 2 else math.comb(num_voters, num_voters // 2) / 2.0**num_voters
