"""Hosts on this machine: network namespaces on slow links, for claims about slow networks."""

from laconic.measure.lab import links
from laconic.measure.lab.host import Counters, Host
from laconic.measure.lab.lab import Lab, labs, remove_abandoned
from laconic.measure.lab.run import noted_signals, run
from laconic.measure.lab.spec import NETWORKS, LabSpec, Link, parse_loss, parse_seconds
