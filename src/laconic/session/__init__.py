"""The running half of a scheme: one step with one body, its undo, its state and its stats."""

from laconic.paths import PHASES
from laconic.session.background import Background, belongs_on_host
from laconic.session.mismatch import OnMismatch, Replicas, check_on_mismatch
from laconic.session.session import TOO_LARGE, Session
from laconic.session.state import PerRankState, RankZeroState, SavedTogether
from laconic.session.stats import Attached, Observed, Stats, metrics_of, step_ends, summary
