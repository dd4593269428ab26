"""laconic makes PyTorch data-parallel training say less.

session = laconic.attach(ddp, "topk:rho=0.01")
"""

from laconic import exchange, memory, quantize, recipes, select, trigger
from laconic.attach import Attached, AutoFollower, AutoSession, HookSession, PerRank, attach, follow, hook, plan
from laconic.errors import (
    FrameError,
    KernelError,
    LabError,
    LaconicError,
    LaunchError,
    PeerError,
    SchemeError,
    ServerLostError,
    StateError,
    TaskError,
)
from laconic.gossip import Follower, FollowerStats
from laconic.outer import OuterFollower, OuterStats
from laconic.planning import Plan
from laconic.recipes import parse
from laconic.scheme import GossipScheme, OuterScheme, Scheme, TorchHook
from laconic.server import ServerStats, serve
from laconic.session import Gathered, Session, Stats

__version__ = "0.1.0"

__all__ = [
    "Attached",
    "AutoFollower",
    "AutoSession",
    "Follower",
    "FollowerStats",
    "FrameError",
    "Gathered",
    "GossipScheme",
    "HookSession",
    "KernelError",
    "LabError",
    "LaconicError",
    "LaunchError",
    "OuterFollower",
    "OuterScheme",
    "OuterStats",
    "PeerError",
    "PerRank",
    "Plan",
    "Scheme",
    "SchemeError",
    "ServerLostError",
    "ServerStats",
    "Session",
    "StateError",
    "Stats",
    "TaskError",
    "TorchHook",
    "attach",
    "exchange",
    "follow",
    "hook",
    "memory",
    "parse",
    "plan",
    "quantize",
    "recipes",
    "select",
    "serve",
    "trigger",
]
