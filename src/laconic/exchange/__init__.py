"""Where it goes. Only this floor talks to other workers, and it counts what it says."""

from laconic.exchange.agreement import agree, agreement_bytes
from laconic.exchange.counted_group import CountedGroup
from laconic.exchange.desk import Desk
from laconic.exchange.group import Group, backend_for, own_group, ranks_that_differ
from laconic.exchange.in_process import InProcess, in_process
from laconic.exchange.medium import Answer, Medium
from laconic.exchange.patterns import AllGather, AllReduce, Pattern, Server, Silent
from laconic.exchange.served import Served
from laconic.exchange.shares import Shares, piece_borders
from laconic.exchange.traffic import Count, Traffic, ring_bytes

PATTERNS: dict[str, type[Pattern]] = {
    "all-reduce": AllReduce,
    "all-gather": AllGather,
    "server": Server,
    "silent": Silent,
}

__all__ = [
    "PATTERNS",
    "AllGather",
    "AllReduce",
    "Answer",
    "Count",
    "CountedGroup",
    "Desk",
    "Group",
    "InProcess",
    "Medium",
    "Pattern",
    "Served",
    "Server",
    "Shares",
    "Silent",
    "Traffic",
    "agree",
    "agreement_bytes",
    "backend_for",
    "in_process",
    "own_group",
    "piece_borders",
    "ranks_that_differ",
    "ring_bytes",
]
