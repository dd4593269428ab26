"""How far gradients are from the laws that selection counts on; the work is done in laconic.measure.inspect."""

from laconic.measure.inspect import Fit, Look, fit, inspect

__all__ = ["Fit", "Look", "fit", "inspect"]
