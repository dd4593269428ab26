"""The one line a training script adds."""

from laconic.attach.attach import Attached, attach
from laconic.attach.serve import ServerStats, serve

__all__ = ["Attached", "ServerStats", "attach", "serve"]
