"""The memories: what each keeps of a parameter, and the account that it opens for a bucket."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.errors import SchemeError, check_share
from laconic.memory.account import Account, FadingAccount, Ledger, MomentumAccount, OneStepAccount


@dataclass(frozen=True)
class Memory:
    """An answer to *what is kept*; what is not sent now is sent later, unless it differs."""

    refunds = True  # whether what rounding loses is deposited again
    kinds: ClassVar[tuple[str, ...]] = ("residual",)  # kept per parameter, by the name that a checkpoint gives them
    momentum = 0.0  # what it carries of an optimizer's

    @property
    def fade(self) -> float:
        """The factor of a balance before each deposit."""
        return 1.0

    def open(self, kept: list[Tensor]) -> Account:
        """An account over the kept tensors of one bucket (one per kind), which it mutates."""
        return Account(*kept) if self.fade == 1 else FadingAccount(self.fade, *kept)

    def ledger(self) -> Ledger[Account]:
        """Accounts for all buckets of a session."""
        return Ledger(self.kinds, self.open)


@dataclass(frozen=True)
class Nothing(Memory):
    """Nothing is kept: without error feedback, what is not sent is gone."""

    refunds = False
    kinds = ()

    def open(self, kept: list[Tensor]) -> Account:
        return OneStepAccount()


@dataclass(frozen=True)
class Residual(Memory):
    """The unsent part is kept: r = d*r + g ; send part of r ; r -= what was sent (Seide et al., Interspeech 2014).

    There d = 1, and nothing is lost. With d < 1 what waits fades, as SparseLoCo lets it (arXiv 2508.15706, d = 0.95).

    Example:
        >>> scheme = laconic.Scheme(quantize="bf16", memory=Residual(0.95))
    """

    decay: float = 1.0  # d; less than 1 forgets

    def __post_init__(self) -> None:
        check_share(self, "decay", ", or use Nothing()")

    @property
    def fade(self) -> float:
        return self.decay


@dataclass(frozen=True)
class MomentumResidual(Memory):
    """Momentum is kept too: u = m*u + g ; v += u ; send part of v ; there v = u = 0 (Lin et al., ICLR 2018).

    The momentum correction and factor masking of Deep Gradient Compression. The momentum lives here, before the
    exchange, so the optimizer must have none of its own.

    Example:
        >>> scheme = laconic.Scheme(memory=MomentumResidual(0.5))
    """

    kinds = ("residual", "velocity")

    momentum: float = 0.9  # m

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise SchemeError(f"MomentumResidual.momentum is {self.momentum}; give a number in [0, 1)")

    def open(self, kept: list[Tensor]) -> Account:
        return MomentumAccount(self.momentum, *kept)


@dataclass(frozen=True)
class Accumulated(Memory):
    """Sums are kept till sent: a = w*a + g ; send part of a ; there a = 0 (Park and Lee, arXiv 2302.07475).

    What rounding lost is not kept: this is the memory for signs, which have no size. The weight w is ours.

    Example:
        >>> scheme = laconic.Scheme(memory=Accumulated(0.9))
    """

    refunds = False

    weight: float = 1.0  # of what has been kept; less than 1 forgets

    def __post_init__(self) -> None:
        check_share(self, "weight")

    @property
    def fade(self) -> float:
        return self.weight
