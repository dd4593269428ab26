"""Hosts on this machine: network namespaces on slow links, for claims about slow networks."""

from laconic.measure.lab.host import Counters, Host
from laconic.measure.lab.lab import Lab, labs, remove_abandoned
from laconic.measure.lab.run import noted_signals, run
from laconic.measure.lab.spec import LabSpec, Link

__all__ = [
    "Counters",
    "Host",
    "Lab",
    "LabSpec",
    "Link",
    "labs",
    "noted_signals",
    "remove_abandoned",
    "run",
]
