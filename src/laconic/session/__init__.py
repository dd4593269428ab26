"""The running half of a scheme: buffers, counters, the thread that exchanges buckets."""

from laconic.session.background import Background, belongs_on_host
from laconic.session.session import Session
from laconic.session.stats import PHASES, Stats

__all__ = ["PHASES", "Background", "Session", "Stats", "belongs_on_host"]
