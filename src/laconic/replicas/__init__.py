"""Models that train apart: outer rounds among all or in pairs, and gossip, behind one Follower."""

from laconic.replicas.follower import Follower, FollowerStats, consensus, gather, policy_for, server_stats
from laconic.replicas.fragments import OuterMomentum, bucket_layouts, divided, inner_momentum
from laconic.replicas.policy import Optimizers, Policy, drop_nonfinite_moments_, listed
from laconic.replicas.rounds import MakeOptimizer, OuterRounds
from laconic.replicas.vector import ModelVector, Part
