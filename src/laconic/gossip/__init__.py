"""Models between peers: when a worker speaks, whom it asks, and what a message says."""

from laconic.gossip.follower import Follower
from laconic.gossip.stats import FollowerStats
