"""Frozen answers to *what is kept*, and the account of each bucket."""

from laconic.memory.account import Account, Due, Ledger, SetAside, Undo
from laconic.memory.memories import Accumulated, Memory, MomentumResidual, Nothing, Residual

MEMORIES: dict[str, type[Memory]] = {
    "none": Nothing,
    "residual": Residual,
    "momentum": MomentumResidual,
    "accumulated": Accumulated,
}
