"""The schedule: a pure function of a seed draws which fault befalls whom, where and when."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from laconic.recipes import parse
from laconic_lab.errors import TaskError

FAMILIES: Mapping[str, Sequence[str]] = {
    "all-reduce": ("dense", "bf16", "maxnorm", "multiscale", "randk-maxnorm:rho=0.5", "lowrank"),
    "all-gather": ("topk:rho=0.05", "dgc:rho=0.05", "chunked", "laplace"),
    "sharded server": ("topk:rho=0.05,exchange=server", "overlap:rho=0.05", "sign", "sparse-sign"),
    "dedicated server": (
        "topk:rho=0.05,exchange=server",
        "overlap:rho=0.05",
        "sign",
        "sparse-sign",
        "sparseloco:every=2,exchange=server",
        "scheme:exchange=server,trigger=rounds(every=2),outer=nesterov",
    ),
    "gossip": ("gossip", "gossip-every", "gossip:rho=0.2", "gossip:mode=matched", "gossip-period:steps=2"),
    "outer": (
        "local:every=2",
        "diloco:every=2",
        "streaming:every=2,fragments=2,delay=1",
        "sparseloco:every=2",
        "noloco:every=2",
    ),
}
PHASES_OF_STEP = ("choose", "encode", "talk", "apply")
PHASES_BETWEEN = ("training", "evaluation", "averaging", "checkpoint", "resume")  # in which nothing is exchanged
PHASES = (*PHASES_OF_STEP, *PHASES_BETWEEN)
MESSAGE_FAULTS = ("drop", "delay", "truncate", "duplicate", "damage")  # on virtual workers, to what is being said
TRUST_FAULTS = ("wrong secret", "wrong certificate")  # of one rank, when all connect
PROCESS_FAULTS = ("kill", "stop", "pause", "slow", "trickle", "full disk", "restart", *TRUST_FAULTS)
LINK_FAULTS = ("cut", "unplug")  # between hosts of a lab, of which the first heals
ON = ("virtual", "processes", "members")
NUM_WORKERS = 3
STEPS = 6
CHECKPOINT_EVERY = 2
_SHARE_ON_PROCESSES = 0.15
MEMBER_SCHEME = "streaming:every=8,fragments=2,delay=2"
MEMBER_PHASES = ("found", "join", "training", "send", "wait", "leave")
MEMBER_FAULTS = ("kill", "restart", "stop", "cut")  # who is killed returns without a state, who restarts with one
_MEMBER_MATRIX = [
    (fault, phase, is_server)
    for fault in MEMBER_FAULTS
    for phase in MEMBER_PHASES
    for is_server in (False, True)
    if not (is_server and fault == "restart")  # a server always has its state
    and not (phase == "found" and fault in ("stop", "cut"))  # nobody has anything to train on meanwhile
]


@dataclass(frozen=True)
class Case:
    """One fault."""

    seed: int
    on: str  # virtual workers, processes, or members
    family: str
    scheme: str
    fault: str
    phase: str
    rank: int
    number: int  # of the step, or on virtual workers of the message

    def __str__(self) -> str:
        return f"{self.fault} of rank {self.rank} at {self.phase} {self.number}, {self.family}, {self.scheme}"


def draw(seed: int, on: str | None = None, scheme: str | None = None, *, hosts: int = 0) -> Case:
    """The fault of a seed, on either kind of worker and under any scheme unless those are given; on hosts of a lab."""
    if on == "members":
        return _draw_of_members(seed, scheme or MEMBER_SCHEME, hosts)
    chance = random.Random(seed)
    drawn_on = ON[chance.random() < _SHARE_ON_PROCESSES]
    family = chance.choice(list(FAMILIES) if scheme is None else _families_of(scheme))
    scheme = scheme or chance.choice(FAMILIES[family])
    on = "processes" if hosts else on or drawn_on
    on_processes = (*PROCESS_FAULTS, *LINK_FAULTS) if hosts else PROCESS_FAULTS
    fault = chance.choice((*MESSAGE_FAULTS, "die") if on == "virtual" else on_processes)
    phase = "talk" if fault in (*MESSAGE_FAULTS, "trickle") else chance.choice(PHASES)
    if fault in ("full disk", "restart"):
        phase = "checkpoint"
    if fault in TRUST_FAULTS:
        phase = "connect"
    rank = chance.randrange(hosts or NUM_WORKERS)
    says_more = on == "virtual" and phase == "talk" and family not in ("gossip", "outer")
    number = chance.randrange(2 * STEPS if says_more else STEPS)  # messages: each step has two buckets
    return Case(seed, on, family, scheme, fault, phase, rank, number)


def _draw_of_members(seed: int, scheme: str, hosts: int) -> Case:
    """Successive seeds walk through every fault at every phase of a member and of the server, whose rank is 0."""
    matrix = [entry for entry in _MEMBER_MATRIX if hosts or entry[0] not in LINK_FAULTS]
    fault, phase, is_server = matrix[seed % len(matrix)]
    chance = random.Random(seed)
    rank = 0 if is_server else chance.randrange(1, hosts or NUM_WORKERS)
    if phase == "found" and not is_server:
        rank = 1  # which is started first
    return Case(seed, "members", "members", scheme, fault, phase, rank, chance.randrange(8, 24))


def _families_of(scheme: str) -> list[str]:
    """Those that a scheme of one's own can be."""
    parsed = parse(scheme)
    if parsed.of_what == "models":
        return ["gossip"]
    if parsed.of_what == "drift":
        return ["dedicated server"] if parsed.has_owners else ["outer"]
    if not parsed.talks:
        raise TaskError(f"{scheme} says nothing, so nothing can befall it; give a scheme that talks")
    if parsed.has_owners:
        return ["sharded server", "dedicated server"]
    return ["all-reduce" if parsed.exchange.adds_in_flight else "all-gather"]


@dataclass
class Outcome:
    """The promises that it broke, and whether it befell anyone at all."""

    broken: list[str] = field(default_factory=list)
    struck: bool = True
    measured: dict[str, float] = field(default_factory=dict)
