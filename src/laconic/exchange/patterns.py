"""The frozen answer to *where it goes*: who hears what a worker sends."""

import math
from dataclasses import dataclass

from laconic.errors import SchemeError
from laconic.exchange.peers import GRAPHS, pairs_of

MODES = ("free", "paired", "wait", "matched")
MOMENTA = ("local", "quasi-global")

_COMBINES = ("mean", "majority", "weighted")


@dataclass(frozen=True)
class Pattern:
    """One way for all workers to hear of each other."""

    adds_in_flight = False  # the network sums, so all workers must send the same positions
    has_owners = False  # each entry has one, who answers for it, and may be a server
    in_pairs = False  # a worker hears one other at a time, so what comes of it differs between workers
    talks = True
    of_what = "gradients"

    @property
    def votes(self) -> bool:
        """Whether answers are signs."""
        return False


@dataclass(frozen=True, kw_only=True)
class AllReduce(Pattern):
    """The network adds position by position; 2*(M-1)/M of the data leaves each worker, whatever M is.

    Integer codes may also be added in two stages: each worker gets everyone's codes for its share of the positions,
    adds them, rounds the mean to a code again without bias, and sends that to all. Codes stay as narrow as one's own.
    """

    adds_in_flight = True

    stages: int = 0  # 1: the network adds; 2: the workers do; 0: whichever the size formula says

    def __post_init__(self) -> None:
        if self.stages not in (0, 1, 2):
            raise SchemeError(f"AllReduce.stages is {self.stages}; give 1, 2, or 0 to let the size decide")


@dataclass(frozen=True)
class AllGather(Pattern):
    """Everyone gets everyone's frame and adds by itself; M-1 frames leave each worker."""


@dataclass(frozen=True, kw_only=True)
class Server(Pattern):
    """Each entry has an owner, who adds up or takes a vote of what the workers send of it, and answers all of them.

    The owners are the workers themselves, each for its share of every bucket, or ranks that hold no data and serve
    (`laconic.serve`); a scheme is the same either way. An answer takes the smallest form: sparse, bitmap or dense.
    """

    has_owners = True

    combine: str = "mean"  # or "majority": the sign of the sum of signs; or "weighted": by each worker's record
    down_rho: float = 0.0  # the largest share of entries an answer holds, the rest waiting with its owner; 0: no limit

    def __post_init__(self) -> None:
        if self.combine not in _COMBINES:
            raise SchemeError(f"Server.combine is {self.combine!r}; give one of {', '.join(_COMBINES)}")
        if not 0 <= self.down_rho <= 1:
            raise SchemeError(f"Server.down_rho is {self.down_rho}; give a share in (0, 1], or 0 for no limit")
        if self.down_rho and self.votes:
            raise SchemeError("a vote has no size, so none is smaller than another; leave Server.down_rho out")

    @property
    def votes(self) -> bool:
        return self.combine != "mean"


@dataclass(frozen=True)
class Silent(Pattern):
    """Nothing is sent and every worker keeps its own gradient: the upper bound on speed, not a way to train."""

    talks = False


@dataclass(frozen=True, kw_only=True)
class Pairs(Pattern):
    """Two workers at a time, drawn from (seed, turn), go to their middle; one of an odd number stands alone.

    As much leaves a worker as it has to say, whatever M is, and nobody waits for more than one other.
    """

    in_pairs = True
    of_what = "drift"

    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Gossip(Pattern):
    """Two workers at a time exchange models and both move to the middle; the sum over the two is unchanged.

    i sends x_i; j answers with x_j and adds (x_i - x_j)/2 to its model; i adds (x_j - x_i as sent)/2 to whatever its
    model is by then (after Ho, Wu, Liu, CCGRID 2018; the exchange without a barrier is ours). `free` asks, waits
    a moment and trains on; in `paired` who asks whom is drawn from (seed, turn), and who is to be asked waits a moment
    for that too; `wait` asks and waits for the answer; `matched` is deterministic: all workers meet at each step, and
    pairs drawn from (seed, step) exchange where one of the two wants to.
    """

    of_what = "models"

    peers: str = "uniform"  # who may ask whom: uniform, ring, exponential, or pairs of ranks like 0-1+1-2
    mode: str = "free"
    grace: float = 1.0  # how long `free` and `paired` may wait for late peers, as a share of the time they train for
    momentum: str = "local"  # or quasi-global: SGD's heeds what peers move the model by, as if it had been its own step
    patience: float = 5.0  # seconds without an answer after which a worker turns to another peer
    seed: int = 0

    def __post_init__(self) -> None:
        if self.peers not in GRAPHS:
            pairs_of(self.peers)
        if self.mode not in MODES:
            raise SchemeError(f"Gossip.mode is {self.mode!r}; give one of {', '.join(MODES)}")
        if self.momentum not in MOMENTA:
            raise SchemeError(f"Gossip.momentum is {self.momentum!r}; give one of {', '.join(MOMENTA)}")
        if not 0 <= self.grace < math.inf:
            raise SchemeError(f"Gossip.grace is {self.grace}; give a share of the training time, 0 to wait for nobody")
        if not 0 < self.patience < math.inf:
            raise SchemeError(f"Gossip.patience is {self.patience}; give seconds above 0")
