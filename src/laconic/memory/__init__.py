"""What is kept for later: the account of each parameter."""

from laconic.memory.account import Account, Due
from laconic.memory.ledger import Ledger
from laconic.memory.memories import Accumulated, Memory, MomentumResidual, Nothing, Residual

MEMORIES: dict[str, type[Memory]] = {
    "none": Nothing,
    "residual": Residual,
    "momentum": MomentumResidual,
    "accumulated": Accumulated,
}
