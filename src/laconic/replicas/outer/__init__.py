"""Models that train alone and agree now and then: drift, anchor, outer optimizer."""

from laconic.replicas.outer.follower import MakeOptimizer, OuterFollower
from laconic.replicas.outer.stats import OuterStats
