"""laconic makes PyTorch data-parallel training say less.

session = laconic.attach(ddp, "topk:rho=0.01")
"""

from laconic import exchange, memory, quantize, recipes, select, trigger
from laconic.attach import Attached, ServerStats, attach, serve
from laconic.errors import (
    FrameError,
    KernelError,
    LabError,
    LaconicError,
    LaunchError,
    SchemeError,
    ServerLostError,
    StateError,
    TaskError,
)
from laconic.recipes import parse
from laconic.scheme import Scheme, TorchHook
from laconic.session import Session, Stats

__version__ = "0.1.0"

__all__ = [
    "Attached",
    "FrameError",
    "KernelError",
    "LabError",
    "LaconicError",
    "LaunchError",
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
    "memory",
    "parse",
    "quantize",
    "recipes",
    "select",
    "serve",
    "trigger",
]
