"""laconic makes PyTorch data-parallel training say less.

session = laconic.attach(ddp, "topk:rho=0.01")
"""

import typing as _typing

from laconic import exchange, memory, optim, outer, quantize, recipes, select, trigger
from laconic.adapters import HookSession, hook
from laconic.api import attach, follow
from laconic.errors import (
    FrameError,
    KernelError,
    LaconicError,
    LaunchError,
    PeerError,
    SchemeError,
    ServerLostError,
    StateError,
)
from laconic.planning import AutoFollower, AutoSession, Plan, plan
from laconic.recipes import parse
from laconic.replicas import Follower, FollowerStats
from laconic.scheme import GossipScheme, OuterScheme, Scheme, TorchHook
from laconic.server import ServerStats, serve
from laconic.session import Attached, PerRankState, RankZeroState, Session, Stats

if _typing.TYPE_CHECKING:
    from laconic.members import Member, MemberServer, MemberStats, join

__version__ = "0.1.0"

__all__ = [
    "Attached",
    "AutoFollower",
    "AutoSession",
    "Follower",
    "FollowerStats",
    "FrameError",
    "GossipScheme",
    "HookSession",
    "KernelError",
    "LaconicError",
    "LaunchError",
    "Member",
    "MemberServer",
    "MemberStats",
    "OuterScheme",
    "PeerError",
    "PerRankState",
    "Plan",
    "RankZeroState",
    "Scheme",
    "SchemeError",
    "ServerLostError",
    "ServerStats",
    "Session",
    "StateError",
    "Stats",
    "TorchHook",
    "attach",
    "exchange",
    "follow",
    "hook",
    "join",
    "memory",
    "optim",
    "outer",
    "parse",
    "plan",
    "quantize",
    "recipes",
    "select",
    "serve",
    "trigger",
]


def __getattr__(name: str) -> object:
    """What runs with members are made of is a tenth of the import, and comes when it is asked for."""
    if name in ("Member", "MemberServer", "MemberStats", "join"):
        from laconic import members

        return getattr(members, name)
    raise AttributeError(f"module 'laconic' has no attribute {name!r}")
