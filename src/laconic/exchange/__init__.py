"""Where it goes. Only this floor talks to other workers, and it counts what it says."""

from laconic.exchange.agreement import agree, agreement_bytes
from laconic.exchange.counted_group import CountedGroup
from laconic.exchange.group import Group, backend_for, own_group, ranks_that_differ
from laconic.exchange.in_process import InProcess, in_process
from laconic.exchange.medium import Medium
from laconic.exchange.patterns import AllGather, AllReduce, Pattern, Silent
from laconic.exchange.traffic import Count, Traffic, ring_bytes

PATTERNS: dict[str, type[Pattern]] = {"all-reduce": AllReduce, "all-gather": AllGather, "silent": Silent}

__all__ = [
    "PATTERNS",
    "AllGather",
    "AllReduce",
    "Count",
    "CountedGroup",
    "Group",
    "InProcess",
    "Medium",
    "Pattern",
    "Silent",
    "Traffic",
    "agree",
    "agreement_bytes",
    "backend_for",
    "in_process",
    "own_group",
    "ranks_that_differ",
    "ring_bytes",
]
