"""Looking into a training run: which law its gradients follow, and what a threshold estimated from it is worth."""

from laconic.measure.inspect.fit import Fit, fit
from laconic.measure.inspect.run import Look, inspect
from laconic.measure.inspect.tail import tail

__all__ = ["Fit", "Look", "fit", "inspect", "tail"]
