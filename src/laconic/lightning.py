"""laconic.lightning: what its users import."""

from laconic.attach.lightning import LaconicStrategy

__all__ = ["LaconicStrategy"]
