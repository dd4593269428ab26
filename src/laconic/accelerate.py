"""laconic.accelerate: what its users import."""

from laconic.attach.accelerate import attach

__all__ = ["attach"]
