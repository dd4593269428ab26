"""Where it goes. Only this floor talks to other workers, and it counts what it says."""

from torch.distributed import ProcessGroup

from laconic.exchange.agreement import agree, agreement_bytes
from laconic.exchange.counted_group import CountedGroup
from laconic.exchange.group import Group, backend_for, own_group, ranks_that_differ, world
from laconic.exchange.in_process import InProcess, in_process
from laconic.exchange.local_mailbox import LocalMailbox, local_mailboxes
from laconic.exchange.mailbox import GlooMailbox, Mailbox, open_mailbox
from laconic.exchange.medium import Medium
from laconic.exchange.patterns import AllGather, AllReduce, Gossip, Pattern, Silent
from laconic.exchange.peers import check_peers, matching, neighbours, pick
from laconic.exchange.traffic import Count, Traffic, ring_bytes

PATTERNS: dict[str, type[Pattern]] = {
    "all-reduce": AllReduce,
    "all-gather": AllGather,
    "silent": Silent,
    "gossip": Gossip,
}

__all__ = [
    "PATTERNS",
    "AllGather",
    "AllReduce",
    "Count",
    "CountedGroup",
    "GlooMailbox",
    "Gossip",
    "Group",
    "InProcess",
    "LocalMailbox",
    "Mailbox",
    "Medium",
    "Pattern",
    "ProcessGroup",
    "Silent",
    "Traffic",
    "agree",
    "agreement_bytes",
    "backend_for",
    "check_peers",
    "in_process",
    "local_mailboxes",
    "matching",
    "neighbours",
    "open_mailbox",
    "own_group",
    "pick",
    "ranks_that_differ",
    "ring_bytes",
    "world",
]
