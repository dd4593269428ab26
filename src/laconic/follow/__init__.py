"""Gossip: no DDP, no barrier; each worker trains alone and exchanges models with its peers."""

from laconic.follow.follower import Follower, follow
from laconic.follow.stats import FollowerStats

__all__ = ["Follower", "FollowerStats", "follow"]
