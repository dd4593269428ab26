"""Findings of things that are slow or wrong here, each with its cure."""

from laconic.doctor.checks import CHECKS, Finding, Seen, findings
from laconic.doctor.examine import examine
