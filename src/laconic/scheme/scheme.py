"""The frozen half: five answers, checked together when they are composed."""

from dataclasses import dataclass

from laconic.errors import SchemeError
from laconic.exchange import AllReduce, Pattern, Server
from laconic.memory import Memory, Nothing
from laconic.quantize import Exact, FloatCode, Grid, ModuloCode, Quantizer, Sign
from laconic.scheme.base import SchemeBase
from laconic.scheme.parts import read_parts
from laconic.select import Everything, Selector
from laconic.trigger import EveryStep, Speech, Trigger


@dataclass(frozen=True, kw_only=True)
class Scheme(SchemeBase):
    """What is sent, how it is written, what is kept, where it goes, and when."""

    says_drift = False  # of a model, as if it were a gradient

    select: Selector = Everything()
    quantize: Quantizer | Grid = Exact()
    memory: Memory = Nothing()
    exchange: Pattern = AllReduce()
    trigger: Trigger = EveryStep()

    def __post_init__(self) -> None:
        read_parts(self)
        self._check_of_gradients()
        sends_some = self.select.density < 1
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

    def _check_of_gradients(self) -> None:
        if self.exchange.in_pairs and not self.says_drift:
            raise SchemeError(
                "Pairs let workers differ, and gradients must be the same on all; use AllReduce(), or OuterScheme(...)"
            )
        if self.of_what == "models":
            raise SchemeError("Gossip exchanges models; use GossipScheme(...), or laconic.parse('gossip')")
        if isinstance(self.trigger, Speech):
            name = type(self.trigger).__name__
            raise SchemeError(f"{name} says when a worker gossips, and all workers must send together; use EveryStep()")
        if self.trigger.in_rounds:
            raise SchemeError("Rounds are for models that train alone in between; use OuterScheme(...), or EveryStep()")
        if isinstance(self.quantize, ModuloCode):
            raise SchemeError("ModuloCode is for models that are nearly alike, which gradients are not; use Gossip()")

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
    def said(self) -> "Scheme":
        """How a gradient is said: a scheme of drift has another one for that."""
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
