"""Gossip: no DDP, no barrier; each worker trains alone and exchanges models with its peers."""

from laconic.gossip.follower import Follower, follow
from laconic.gossip.stats import FollowerStats
