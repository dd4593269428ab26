"""Errors of the lab, under laconic's own.

LaconicError
+-- TaskError       a task whose data or options are missing or wrong
+-- LaunchError     workers that could not be started or did not finish
+-- LabError        a lab that cannot be made, or a host or link that is not there
"""

from laconic.errors import LaconicError, LaunchError


class TaskError(LaconicError, ValueError):
    """A training task's data or options are missing or wrong."""


class LabError(LaconicError):
    """A lab cannot be made here, or has no such host or link."""


__all__ = ["LabError", "LaconicError", "LaunchError", "TaskError"]
