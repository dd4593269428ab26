"""Models between peers: when a worker speaks, whom it asks, and what a message says."""

from laconic.replicas.gossip.follower import Follower
from laconic.replicas.gossip.stats import FollowerStats
