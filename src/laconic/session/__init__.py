"""The running half of a scheme: one step with one body, its undo, its state and its stats."""

from laconic.paths import PHASES
from laconic.session.background import Background, belongs_on_host
from laconic.session.replicas import OnDrift, Replicas, check_on_drift
from laconic.session.session import TOO_LARGE, Session
from laconic.session.state import Gathered, SavedTogether
from laconic.session.stats import Stats, summary
