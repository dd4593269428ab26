"""The one line a training script adds."""

from laconic.attach.attach import Attached, attach

__all__ = ["Attached", "attach"]
