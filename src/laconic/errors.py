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
    """Workers could not be started, or did not finish."""
