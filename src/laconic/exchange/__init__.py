"""Where it goes. Only this floor talks to other workers, and it counts what it says."""

from torch.distributed import ProcessGroup

from laconic.exchange.agreement import agree, agreement_bytes
from laconic.exchange.counted_group import CountedGroup
from laconic.exchange.desk import Desk
from laconic.exchange.group import Group, backend_for, own_group, ranks_that_differ, world
from laconic.exchange.in_process import InProcess, in_process
from laconic.exchange.local_mailbox import LocalMailbox, local_mailboxes
from laconic.exchange.mailbox import QUESTION_HEAD_BYTES, Mailbox
from laconic.exchange.medium import Answer, Medium
from laconic.exchange.patterns import AllGather, AllReduce, Gossip, Pattern, Server, Silent
from laconic.exchange.peers import asks_of, check_peers, matching, neighbours, pick
from laconic.exchange.served import Served
from laconic.exchange.shares import Shares, piece_borders
from laconic.exchange.tcp_mailbox import TcpMailbox, open_mailbox
from laconic.exchange.traffic import Count, Traffic, ring_bytes

PATTERNS: dict[str, type[Pattern]] = {
    "all-reduce": AllReduce,
    "all-gather": AllGather,
    "server": Server,
    "gossip": Gossip,
    "silent": Silent,
}

__all__ = [
    "PATTERNS",
    "QUESTION_HEAD_BYTES",
    "AllGather",
    "AllReduce",
    "Answer",
    "Count",
    "CountedGroup",
    "Desk",
    "Gossip",
    "Group",
    "InProcess",
    "LocalMailbox",
    "Mailbox",
    "Medium",
    "Pattern",
    "ProcessGroup",
    "Served",
    "Server",
    "Shares",
    "Silent",
    "TcpMailbox",
    "Traffic",
    "agree",
    "agreement_bytes",
    "asks_of",
    "backend_for",
    "check_peers",
    "in_process",
    "local_mailboxes",
    "matching",
    "neighbours",
    "open_mailbox",
    "own_group",
    "pick",
    "piece_borders",
    "ranks_that_differ",
    "ring_bytes",
    "world",
]
