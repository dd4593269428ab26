"""The one line a training script adds."""

from laconic.attach.auto import AutoFollower, AutoSession
from laconic.attach.ddp import Attached, attach
from laconic.attach.follow import follow
from laconic.attach.hook import HookSession, hook
from laconic.attach.per_rank import PerRank
from laconic.attach.plan import plan
