"""Models that train alone and agree now and then: drift, anchor, outer optimizer."""

from laconic.outer.follower import MakeOptimizer, OuterFollower
from laconic.outer.stats import OuterStats
