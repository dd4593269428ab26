"""Models that train apart: outer rounds among all or in pairs, and gossip, behind one Follower."""

from laconic.replicas.follower import Follower, FollowerStats, consensus, gather, policy_for, server_stats
from laconic.replicas.fragments import bucket_layouts, divided
from laconic.replicas.optimizers import (
    Optimizers,
    StepReminder,
    drop_nonfinite_moments_,
    inner_momentum,
    listed,
)
from laconic.replicas.policy import Policy
from laconic.replicas.rounds import MakeOptimizer, OuterRounds
from laconic.replicas.vector import ModelVector, Part
