"""Small but real jobs: data, a model, and what counts as right."""

from laconic_lab.tasks.chars import CHARS
from laconic_lab.tasks.cifar import CIFAR10, CIFAR100
from laconic_lab.tasks.fashion_mnist import FASHION_MNIST
from laconic_lab.tasks.task import Data, Model, Task, Training

TASKS: dict[str, Task] = {task.name: task for task in (FASHION_MNIST, CIFAR10, CIFAR100, CHARS)}

__all__ = ["TASKS", "Data", "Model", "Task", "Training"]
