"""Looking into a training run: which law its gradients follow, and what a threshold estimated from it is worth."""

from laconic_lab.inspect.fit import Fit, fit, tail
from laconic_lab.inspect.run import Look, inspect

__all__ = ["Fit", "Look", "fit", "inspect", "tail"]
