"""Models that train apart: in outer rounds or by gossip."""

from laconic.replicas.gossip import Follower, FollowerStats
from laconic.replicas.outer import MakeOptimizer, OuterFollower, OuterStats
