"""The frozen answers to *where it goes*: who receives what a worker sends."""

import math
from dataclasses import dataclass

from laconic.errors import SchemeError, check_option
from laconic.exchange.peers import GRAPHS, pairs_of

MODES = ("free", "paired", "wait", "matched")
MOMENTA = ("local", "quasi-global")

_COMBINES = ("mean", "majority", "weighted")


@dataclass(frozen=True)
class Pattern:
    """A pattern by which all workers receive what the others send."""

    adds_in_flight = False  # the network sums, so all workers must send the same positions
    has_owners = False  # each entry has one, who answers for it, and may be a server
    in_pairs = False  # a worker exchanges with one other at a time, so what comes of it differs between workers
    talks = True  # whether anything is sent
    of_what = "gradients"

    @property
    def votes(self) -> bool:
        """Whether replies are signs."""
        return False


@dataclass(frozen=True, kw_only=True)
class AllReduce(Pattern):
    """The network adds position by position; 2*(M-1)/M of the data leaves each worker, whatever M is.

    Integer codes may also be added in two stages: each worker gets everyone's codes for its share of the positions,
    adds them, rounds the mean to a code again without bias, and sends that to all. Codes stay as narrow as one's own.

    Example:
        >>> scheme = laconic.Scheme(quantize="maxnorm(levels=7)", exchange=AllReduce(stages=2))
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
    """Each entry has an owner, who adds up or takes a vote of what the workers send of it, and replies to all.

    The owners are the workers themselves, each for its share of every bucket, or ranks that hold no data and serve
    (`laconic.serve`); a scheme is the same either way. A reply takes the smallest form: sparse, bitmap or dense.

    Example:
        >>> scheme = laconic.recipes.topk(0.01, exchange=Server(down_rho=0.1))
    """

    has_owners = True

    combine: str = "mean"  # or "majority": the sign of the sum of signs; or "weighted": by each worker's record
    down_rho: float = 0.0  # the largest share of entries a reply holds, the rest waiting with its owner; 0: no limit

    def __post_init__(self) -> None:
        check_option(self, "combine", _COMBINES)
        if not 0 <= self.down_rho <= 1:
            raise SchemeError(f"Server.down_rho is {self.down_rho}; give a share in (0, 1], or 0 for no limit")
        if self.down_rho and self.votes:
            raise SchemeError("a vote has no size, so none is smaller than another; leave Server.down_rho out")

    @property
    def votes(self) -> bool:
        return self.combine != "mean"


@dataclass(frozen=True)
class Silent(Pattern):
    """Nothing is sent and every worker keeps its own gradient: the upper bound on speed, no training."""

    talks = False


@dataclass(frozen=True, kw_only=True)
class Pairs(Pattern):
    """Two workers at a time, drawn from (seed, round), go to their middle; one of an odd number stands alone.

    One drift leaves a worker per round, whatever M is, and nobody waits for more than one other.

    Example:
        >>> laconic.recipes.noloco(16, seed=3).exchange == Pairs(seed=3)
        True
    """

    in_pairs = True
    of_what = "drift"

    seed: int = 0  # of the draw of pairs


@dataclass(frozen=True, kw_only=True)
class Gossip(Pattern):
    """Two workers at a time exchange models and both move to the middle; the sum over the two is unchanged.

    i sends x_i; j replies with x_j and adds (x_i - x_j)/2 to its model; i adds (x_j - x_i as sent)/2 to whatever its
    model is by then (after Ho, Wu, Liu, CCGRID 2018; the exchange without a barrier is ours). `free` sends a
    request, waits a moment and trains on; in `paired` pairs are drawn from (seed, round), and both wait a moment; in
    `wait` the sender waits for the reply; `matched` is deterministic: all workers meet at each step, and pairs drawn
    from (seed, step) exchange where one of the two wants to.

    Example:
        >>> scheme = laconic.GossipScheme(exchange=Gossip(peers="ring"))
    """

    of_what = "models"

    peers: str = "uniform"  # who may exchange with whom: uniform, ring, exponential, or pairs of ranks like 0-1+1-2
    mode: str = "free"  # or paired, wait, matched
    wait_budget: float = (
        1.0  # how long `free` and `paired` may wait for late peers, as a share of the time they train for
    )
    momentum: str = "local"  # or quasi-global: SGD's heeds what peers move the model by, as if it had been its own step
    patience: float = 5.0  # seconds without a reply after which a worker turns to another peer
    seed: int = 0

    def __post_init__(self) -> None:
        if self.peers not in GRAPHS:
            pairs_of(self.peers)
        check_option(self, "mode", MODES)
        check_option(self, "momentum", MOMENTA)
        if not 0 <= self.wait_budget < math.inf:
            raise SchemeError(
                f"Gossip.wait_budget is {self.wait_budget}; give a share of the training time, 0 to wait for nobody"
            )
        if not 0 < self.patience < math.inf:
            raise SchemeError(f"Gossip.patience is {self.patience}; give seconds above 0")
