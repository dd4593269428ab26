"""What is slow or wrong here, each finding with its cure."""

from laconic.doctor.checks import CHECKS, Finding, Seen, findings
from laconic.doctor.examine import examine
