"""PyTorch's own DDP hooks, as something to compare a composition with."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from laconic.errors import SchemeError
from laconic.exchange import AllReduce
from laconic.scheme.scheme import SchemeBase

TORCH_HOOKS = ("fp16", "powersgd")


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
        if self.hook not in TORCH_HOOKS:
            raise SchemeError(f"TorchHook.hook is {self.hook!r}; give one of {', '.join(TORCH_HOOKS)}")
        if self.rank < 1:
            raise SchemeError(f"rank is {self.rank}; give 1 or more")
        if self.start < 2:
            raise SchemeError(f"start is {self.start}; give 2 or more")

    def __str__(self) -> str:
        own = f":rank={self.rank},start={self.start}" if self.hook == "powersgd" else ""
        return self.label or f"torch-{self.hook}{own}"
