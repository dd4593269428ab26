"""What is slow or wrong here, each finding with its cure."""

from laconic.measure.doctor.checks import CHECKS, Seen
from laconic.measure.doctor.examine import examine
from laconic.measure.doctor.finding import Finding
