"""Frozen answers to *where it goes*, who exchanges with whom in gossip, and who owns which entries."""

from laconic.exchange.patterns import AllGather, AllReduce, Gossip, Pairs, Pattern, Server, Silent
from laconic.exchange.peers import asks_of, check_peers, matching, neighbours, pick
from laconic.exchange.shares import Shares, piece_borders
from laconic.transport import InProcess, in_process  # virtual workers, to try an answer with

PATTERNS: dict[str, type[Pattern]] = {
    "all-reduce": AllReduce,
    "all-gather": AllGather,
    "server": Server,
    "gossip": Gossip,
    "pairs": Pairs,
    "silent": Silent,
}
