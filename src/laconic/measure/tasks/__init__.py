"""Small but real jobs: data, a model, and what counts as right."""

from laconic.measure.tasks.chars import CHARS
from laconic.measure.tasks.cifar10 import CIFAR10
from laconic.measure.tasks.fashion_mnist import FASHION_MNIST
from laconic.measure.tasks.task import Data, Model, Task, Training

TASKS: dict[str, Task] = {task.name: task for task in (FASHION_MNIST, CIFAR10, CHARS)}

__all__ = ["TASKS", "Data", "Model", "Task", "Training"]
