"""For tests of code that uses laconic: workers in one process, networks that fail on purpose, and fault points.

Example:
    >>> def work(transport):
    ...     session = Session(laconic.parse("topk:rho=0.01"), FaultyCollectives(transport, Faults({3: Fault.DROP})))
    ...     ...
    >>> in_process(4, work)
"""

from laconic.fault_points import FAULT_POINTS, at_fault_point, fault_point
from laconic.transport import (
    Fault,
    Faults,
    FaultyCollectives,
    FaultyMailbox,
    InProcess,
    WorkerDiedError,
    in_process,
    open_mailbox,
)

__all__ = [
    "FAULT_POINTS",
    "Fault",
    "Faults",
    "FaultyCollectives",
    "FaultyMailbox",
    "InProcess",
    "WorkerDiedError",
    "at_fault_point",
    "fault_point",
    "in_process",
    "open_mailbox",
]
