"""The frozen half: five answers, checked together when they are composed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from laconic.errors import SchemeError
from laconic.exchange import AllReduce, Pattern, Server
from laconic.memory import Memory, Nothing
from laconic.quantize import BF16, FP16, Exact, FloatCode, Grid, ModuloCode, Quantizer, Sign
from laconic.scheme.parts import COMPOSED, PARTS, read_parts, write_pairs, write_part
from laconic.select import Everything, Selector
from laconic.trigger import EveryStep, Schedule

_FLOATS = (Exact(), BF16(), FP16())
_TORCH_HOOKS = ("fp16", "powersgd")


class SchemeBase:
    """A scheme of any kind; str() gives a text that `laconic.parse` reads back: the recipe's own form, or all answers.

    `of_what` is the vector that is exchanged: gradients (`attach`), drift or models (`follow`).
    """

    of_what: ClassVar[str]
    is_torch_hook: ClassVar[bool] = False

    exchange: Pattern
    label = ""  # set by a recipe; no field, so that dataclasses.replace() cannot carry it to another composition

    @property
    def answers(self) -> dict[str, Any]:
        """Its parts, by the question that each answers."""
        return {question: getattr(self, question) for question in PARTS if hasattr(self, question)}

    @property
    def exchanged(self) -> Scheme:
        """How all workers exchange one vector, the gradient or the drift."""
        raise SchemeError(f"{self} exchanges no vector among all workers")

    @property
    def talks(self) -> bool:
        """Whether anything is sent at all."""
        return self.exchange.talks

    @property
    def has_owners(self) -> bool:
        """Whether entries have owners who answer for them, and who may be servers."""
        return self.exchange.has_owners

    def __str__(self) -> str:
        return self.label or f"{COMPOSED}:" + write_pairs({q: write_part(q, part) for q, part in self.answers.items()})


@dataclass(frozen=True, kw_only=True)
class Scheme(SchemeBase):
    """What is sent, how it is written, what is kept, where it goes, and when."""

    of_what: ClassVar[Literal["gradients"]] = "gradients"
    is_torch_hook: ClassVar[Literal[False]] = False

    select: Selector = Everything()
    quantize: Quantizer | Grid = Exact()
    memory: Memory = Nothing()
    exchange: Pattern = AllReduce()
    trigger: Schedule = EveryStep()

    def __post_init__(self) -> None:
        read_parts(self)
        self._check_kinds()
        sends_some = not self.select.sends_all
        if self.exchange.adds_in_flight and not self.select.is_shared:
            raise SchemeError(
                f"AllReduce adds position by position, but {type(self.select).__name__} picks other positions on every "
                "worker; use exchange=AllGather()"
            )
        if not self.talks and (sends_some or self.memory.kinds):
            raise SchemeError(
                "Silent sends nothing, so nothing can be selected or kept; use Everything() and Nothing()"
            )
        if self.select.is_shared and sends_some and not self.exchange.adds_in_flight:
            name = type(self.select).__name__
            raise SchemeError(f"{name} sends what a network can add, position by position; use AllReduce()")
        if self.select.factors:
            self._check_factors()
        if self.trigger.thins_out and not sends_some:
            raise SchemeError(
                "Ramp lowers the share that is sent, but everything is sent; use EveryStep() or TopK(rho=...)"
            )
        if self.exchange.adds_in_flight and not self.quantize.adds:
            name = type(self.quantize).__name__
            raise SchemeError(
                f"AllReduce adds in flight, but {name} codes cannot be added; use Server() or AllGather()"
            )
        if self.quantize.rounds_to_nearest and not self.memory.refunds:
            name = type(self.quantize).__name__
            raise SchemeError(f"{name} rounds to the nearest, which is biased unless the loss is kept; use Residual()")
        if self.select.needs_owners and not self.has_owners:
            raise SchemeError("Overlap makes unions small, which only a server's answer gains by; use Server()")
        if self.has_owners:
            self._check_server()
        if isinstance(self.quantize, Grid):
            self._check_grid(self.quantize)
        elif isinstance(self.exchange, AllReduce) and self.exchange.stages == 2:
            raise SchemeError("two stages round integer codes again, and these are none; use stages=0 or MaxNorm()")

    def _check_kinds(self) -> None:
        """SchemeError where a part is made for exchanges of another kind."""
        if self.exchange.of_what == "models":
            raise SchemeError("Gossip exchanges models; use GossipScheme(...), or laconic.parse('gossip')")
        name = type(self.trigger).__name__
        if "models" in self.trigger.of_what and "gradients" not in self.trigger.of_what:
            raise SchemeError(f"{name} times a gossip, and all workers must send together; use EveryStep()")
        if "drift" in self.trigger.of_what:
            raise SchemeError("Rounds are for models that train apart; use OuterScheme(...), or EveryStep()")
        if isinstance(self.quantize, ModuloCode):
            raise SchemeError("ModuloCode is for models that are nearly alike, which gradients are not; use Gossip()")
        sends_floats = self.select == Everything() and self.memory == Nothing() and self.quantize in _FLOATS
        if self.exchange.in_pairs and not sends_floats:
            raise SchemeError(
                "pairs send each other everything and keep nothing; use select=Everything(), quantize=BF16(), FP16() "
                "or Exact(), and memory=Nothing()"
            )

    def _check_factors(self) -> None:
        if not isinstance(self.quantize, FloatCode):
            name = type(self.quantize).__name__
            raise SchemeError(f"LowRank's factors are added as floats, which {name} is not; use BF16() or Exact()")
        if not self.memory.refunds:
            raise SchemeError("LowRank sends little of a matrix at a step, so the rest must be kept; use Residual()")
        if self.trigger.thins_out:
            raise SchemeError("Ramp lowers the share that is sent, which the rank says; use EveryStep() or WarmUp()")

    def _check_server(self) -> None:
        if self.server.votes and not isinstance(self.quantize, Sign):
            raise SchemeError("a vote is taken among signs; use quantize=Sign(), or Server(combine='mean')")
        if self.server.votes and self.memory.refunds:
            raise SchemeError("a vote has no size, so its rounding cannot be kept; use Accumulated() or Nothing()")
        if self.server.votes and self.trigger.density(0, 0.5) >= 1:
            raise SchemeError("a dense step and a vote are not of one size; use EveryStep() or Ramp()")
        if self.server.down_rho and not self.memory.refunds:
            raise SchemeError("Server.down_rho makes owners keep things, so must the workers; use memory=Residual()")

    def _check_grid(self, grid: Grid) -> None:
        name = type(grid).__name__
        if not self.exchange.adds_in_flight:
            raise SchemeError(f"{name} codes lie on a grid that all workers share, to be added; use AllReduce()")
        if grid.levels == 1 and self.memory.kinds:
            # A code of one level may be a whole norm off; kept, that makes the next norm larger, and so on.
            raise SchemeError(f"{name} of one level loses too much to be kept; use levels=2 or more, or Nothing()")

    @property
    def exchanged(self) -> Scheme:
        return self

    @property
    def server(self) -> Server:
        """What owners do, where entries have any."""
        if not isinstance(self.exchange, Server):
            raise SchemeError(f"{self} asks no server; give one with exchange=Server(), or leave the servers out")
        return self.exchange

    @property
    def frame_code(self) -> Quantizer:
        """How values are written, where every worker sends a frame of its own."""
        assert isinstance(self.quantize, Quantizer)
        return self.quantize

    @property
    def float_code(self) -> FloatCode:
        """How values are written, where a network adds floats."""
        assert isinstance(self.quantize, FloatCode)
        return self.quantize

    @property
    def holds(self) -> bool:
        """Whether the owners of a server hold something from step to step: what their answers round away or omit."""
        if not self.has_owners or self.server.votes or not self.memory.refunds:
            return False
        return self.server.down_rho > 0 or self.quantize != Exact()


@dataclass(frozen=True, kw_only=True)
class TorchHook(SchemeBase):
    """One of PyTorch's own DDP hooks behind the same face: a control to compare with, not a composition."""

    of_what: ClassVar[Literal["gradients"]] = "gradients"
    is_torch_hook: ClassVar[Literal[True]] = True
    exchange = AllReduce()

    hook: str
    rank: int = 1  # PowerSGD's
    start: int = 2  # PowerSGD: plain all-reduce before this step; PyTorch refuses less than 2 with error feedback

    def __post_init__(self) -> None:
        if self.hook not in _TORCH_HOOKS:
            raise SchemeError(f"TorchHook.hook is {self.hook!r}; give one of {', '.join(_TORCH_HOOKS)}")
        if self.rank < 1:
            raise SchemeError(f"rank is {self.rank}; give 1 or more")
        if self.start < 2:
            raise SchemeError(f"start is {self.start}; give 2 or more")

    def __str__(self) -> str:
        own = f":rank={self.rank},start={self.start}" if self.hook == "powersgd" else ""
        return self.label or f"torch-{self.hook}{own}"
