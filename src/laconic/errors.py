"""Every error laconic raises on purpose.

LaconicError
+-- SchemeError     a scheme whose answers do not fit together, or a text that names none
+-- FrameError      a frame from a peer that is damaged or not the one expected
+-- ServerLostError a dedicated server that is gone, or has given this worker up
+-- PeerError       a peer that has died, given up or cannot be reached
+-- StateError      a saved state that does not fit this session
+-- KernelError     a kernel backend that was asked for by name and is not there
+-- LaunchError     workers that could not be started or did not finish
"""

import difflib
import math
from collections import abc


class LaconicError(Exception):
    """Base of the tree; its text is one line that says what to do."""


class SchemeError(LaconicError, ValueError):
    """The five answers do not fit together, or a text names no scheme."""


class FrameError(LaconicError):
    """A frame is damaged, or belongs to another step, bucket or scheme."""


class ServerLostError(LaconicError):
    """A dedicated server is gone, or silent, or has given this worker up."""


class PeerError(LaconicError):
    """A peer has died, given up or cannot be reached; those who gossip go on without it."""


class StateError(LaconicError, ValueError):
    """A saved state does not fit this session."""


class KernelError(LaconicError):
    """A kernel backend was asked for by name and cannot be used."""


class LaunchError(LaconicError):
    """Workers could not be started, or did not finish; `is_repeated` where rank 0 raises the same."""

    def __init__(self, text: str, *, is_repeated: bool = False) -> None:
        super().__init__(text)
        self.is_repeated = is_repeated


def check_least(part: object, **least: float) -> None:
    """SchemeError where a field of a part is below the least that it may be."""
    for field, lowest in least.items():
        if not getattr(part, field) >= lowest:
            name = f"{type(part).__name__}.{field}"
            raise SchemeError(f"{name} is {getattr(part, field)}; give {lowest} or more")


def check_share(part: object, field: str, cure: str = "") -> None:
    """SchemeError unless a field of a part is in (0, 1]."""
    if not 0 < getattr(part, field) <= 1:
        name = f"{type(part).__name__}.{field}"
        raise SchemeError(f"{name} is {getattr(part, field)}; give a share in (0, 1]{cure}")


def check_option(part: object, field: str, options: abc.Iterable[str]) -> None:
    """SchemeError unless a field of a part is one of the options."""
    if (given := getattr(part, field)) not in options:
        raise SchemeError(f"{type(part).__name__}.{field} is {given!r}; give one of {', '.join(options)}")


def check_timeout(timeout_s: float | None) -> None:
    """SchemeError unless a timeout is a number of seconds; None stands for the one that is usual."""
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise SchemeError(f"timeout_s is {timeout_s}; give seconds above 0, or leave it out for the usual ones")


def nearest(name: str, names: abc.Collection[str], others: str = "") -> str:
    """The end of an error about an unknown name: the one that was probably meant, or all there are."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"give one of {', '.join(names)}{others}"
