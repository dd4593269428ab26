"""What is kept for later: the account of each parameter."""

from laconic.memory.account import Account, Due, Memory
from laconic.memory.accumulated import Accumulated
from laconic.memory.ledger import Ledger
from laconic.memory.momentum import MomentumResidual
from laconic.memory.nothing import Nothing
from laconic.memory.residual import Residual

MEMORIES: dict[str, type[Memory]] = {
    "none": Nothing,
    "residual": Residual,
    "momentum": MomentumResidual,
    "accumulated": Accumulated,
}
