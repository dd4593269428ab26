"""What is slow or wrong here, each finding with its cure."""

from laconic.doctor.checks import CHECKS, Finding, Seen
from laconic.doctor.examine import examine
