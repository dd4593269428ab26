"""Hosts on this machine: network namespaces on slow links, for claims about slow networks."""

from laconic_lab.network.host import Counters, Host
from laconic_lab.network.lab import Lab, labs, remove_abandoned
from laconic_lab.network.run import noted_signals, run
from laconic_lab.network.spec import NETWORKS, LabSpec, Link
