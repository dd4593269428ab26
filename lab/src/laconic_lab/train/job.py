"""A training run as it is asked for; each field is an option of the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from laconic.recipes import parse
from laconic.scheme import GossipScheme, TorchHook
from laconic.server import TIMEOUT_S, check_wait
from laconic_lab.errors import TaskError
from laconic_lab.figures import MEASURES, Measure
from laconic_lab.tasks import TASKS, Data, Training
from laconic_lab.train.optimizer import OPTIMIZERS, settled

DEFAULT_STEPS = 300
_CHOICES = {
    "task": tuple(TASKS), "schedule": ("cosine", "constant"), "amp": ("bf16", "fp16"), "backend": ("gloo", "nccl"),
    "device": ("cpu", "cuda"),
}  # fmt: skip
_ABOVE_ZERO = (
    *("workers", "steps", "epochs", "batch", "accumulate", "context", "lr"),
    *("labels_per_worker", "eval_every", "server_timeout"),
)
# Of the numbers that an option takes: whether one is among them, and what to give.
_LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(_ABOVE_ZERO, (lambda x: 0 < x < math.inf, "a finite number above 0")),
    "momentum": (lambda x: 0 <= x < 1, "a number in [0, 1)"),
    "weight_decay": (lambda x: 0 <= x < math.inf, "a finite number of 0 or more"),
    "clip_norm": (lambda x: x > 0, "a number above 0, or inf for none"),
    "warmup": (lambda x: x >= 0, "0 or more steps"),
    "servers": (lambda x: x >= 0, "0 or more"),
    "seed": (lambda x: 0 <= x < 2**63, f"a whole number from 0 to {2**63 - 1}"),
}


def _models() -> str:
    """Those of tasks that have several."""
    return "; ".join(f"{task.name}: {', '.join(task.models)}" for task in TASKS.values() if len(task.models) > 1)


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run."""

    task: str = _option("fashion-mnist", f"what to train: {', '.join(TASKS)}")
    model: str | None = _option(None, f"one of the task's models ({_models()})")
    data: Path | None = _option(None, "folder or file of the data; fashion-mnist has a slice built in")
    scheme: str = _option("topk:rho=0.01", "how gradients are exchanged; see `laconic schemes`; auto: as a plan says")
    auto: bool = _option(False, "choose the scheme by a plan at the start, like --scheme auto")
    workers: int = _option(4, "worker processes on this machine; under torchrun its own number counts")
    servers: int = _option(0, "more processes, or hosts of --hosts, that hold no data and answer for a server scheme")
    server_timeout: float = _option(TIMEOUT_S, "seconds without a message after which a peer counts as gone")
    wait: float | None = _option(None, "seconds that a server waits for late workers of outer steps (default: for all)")
    steps: int | None = _option(None, f"steps to train (default {DEFAULT_STEPS}, unless --epochs is given)")
    epochs: float | None = _option(None, "passes over the data, instead of --steps")
    batch: int | None = _option(None, "examples per worker and step")
    context: int | None = _option(None, "tokens per example, of a task whose examples are made of those")
    optimizer: str | None = _option(None, f"{' or '.join(OPTIMIZERS)} (default: what the model is best trained with)")
    lr: float | None = _option(None, "peak learning rate; it warms up, then follows --schedule")
    warmup: int | None = _option(None, "steps to the peak learning rate (default: a twentieth of them)")
    schedule: str = _option("cosine", "of the learning rate after its peak: cosine or constant")
    momentum: float | None = _option(None, "of sgd; a scheme that carries momentum takes its place")
    betas: str | None = _option(
        None, "of adamw and of muon's vectors, as in 0.9,0.95; a scheme that carries momentum takes the first's place"
    )
    weight_decay: float | None = _option(None, "of the optimizer; adamw's is for matrices alone")
    clip_norm: float | None = _option(None, "norm above which an averaged gradient is scaled down to it; inf for none")
    accumulate: int = _option(1, "micro-batches that each batch is cut into, whose gradients add up to one exchange")
    amp: str | None = _option(None, "bf16 or fp16: mixed precision, of which fp16 scales the loss")
    seed: int = _option(0, "seed of weights, data order and everything drawn")
    labels_per_worker: int | None = _option(None, "non-IID data: each worker holds about this many labels")
    flipped: int = _option(0, "workers that send their gradients with the wrong sign: how much harm they do")
    in_process: bool = _option(False, "virtual workers in this process, to study many; times are of all together")
    eval_every: int = _option(25, "steps between evaluations; their time is not counted")
    backend: str = _option("gloo", "gloo or nccl")
    device: str = _option("cpu", "cpu or cuda")
    out: Path | None = _option(None, "folder for records and checkpoints")
    no_pipeline: bool = _option(False, "exchange one bucket after the other, without overlap")
    no_checkpoint: bool = _option(False, "write records alone to --out")
    resume: bool = _option(False, "continue from the checkpoint in --out")
    quiet: bool = _option(False, "print no result on stdout")
    json: bool = _option(False, "print the result as one JSON object, as the last line on stdout")

    def __post_init__(self) -> None:
        self._settle_scheme()
        for name, (is_allowed, cure) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not is_allowed(value):
                raise TaskError(f"--{name.replace('_', '-')} is {value}; give {cure}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in (None, *choices):
                raise TaskError(f"--{name} is {getattr(self, name)!r}; give {' or '.join(choices)}")
        self._check_workers()
        if self.steps is not None and self.epochs is not None:
            raise TaskError("--steps and --epochs say the same thing twice; give one")
        self._check_optimizer()
        scheme = parse(self.scheme)
        if self.amp == "fp16" and isinstance(scheme, TorchHook) and scheme.hook == "powersgd":
            raise TaskError(
                f"{self.scheme} keeps what it did not send inside PyTorch, where one overflow stays; give --amp bf16"
            )
        if self.backend == "nccl" and self.device == "cpu":
            raise TaskError("--backend nccl needs --device cuda")
        if self.out is None and self.resume:
            raise TaskError("--resume needs --out DIR")

    def _settle_scheme(self) -> None:
        if self.scheme == "auto":
            object.__setattr__(self, "scheme", "bf16")  # until it is chosen
            object.__setattr__(self, "auto", True)
        object.__setattr__(self, "scheme", str(parse(self.scheme)))  # as it prints everywhere else

    def _check_optimizer(self) -> None:
        if self.warmup is not None and self.epochs is None and self.warmup > (self.steps or DEFAULT_STEPS):
            raise TaskError(f"--warmup is {self.warmup}; give no more than --steps, {self.steps or DEFAULT_STEPS}")
        batch = self.training.batch  # an error where settings do not fit together
        if batch % self.accumulate:
            raise TaskError(
                f"a batch of {batch} cannot be cut into {self.accumulate} equal micro-batches; give --batch a multiple"
            )

    def _check_workers(self) -> None:
        if self.auto and (self.servers or self.in_process):
            raise TaskError("--scheme auto chooses for workers alone; leave --servers and --in-process out")
        check_wait(self.scheme, self.wait, self.servers)
        if not 0 <= self.flipped <= self.workers:
            raise TaskError(f"--flipped is {self.flipped}; give 0 to --workers, {self.workers}")
        if self.in_process and (self.resume or self.servers > self.workers):
            raise TaskError("--in-process runs from its first step, with no more --servers than --workers")
        scheme = parse(self.scheme)
        if self.in_process and not scheme.talks:
            raise TaskError(
                f"{self.scheme} trains a model on each worker; leave --in-process out, or give another scheme"
            )
        if self.in_process and isinstance(scheme, GossipScheme) and scheme.exchange.mode != "matched":
            raise TaskError(f"--in-process workers meet at each step; give {self.scheme} mode=matched")

    @cached_property  # launchers ask many times a second, and reading a scheme takes a millisecond
    def asks_servers(self) -> bool:
        """Whether the servers of this job have something to do."""
        return self.servers > 0 and parse(self.scheme).has_owners

    @cached_property
    def follows(self) -> bool:
        """Whether each worker trains a model of its own."""
        return parse(self.scheme).of_what != "gradients"

    @cached_property
    def is_gossip(self) -> bool:
        """Whether those meet without all the others, some of whom may have died."""
        return parse(self.scheme).of_what == "models"

    @cached_property
    def training(self) -> Training:
        """The settings of training: the model's own, unless they are given here or the scheme asks for others."""
        given = {option.name: getattr(self, option.name) for option in fields(Training)}
        if self.betas is not None:
            given["betas"] = _betas(self.betas)
        given_here = {name: value for name, value in given.items() if value is not None}
        return settled(TASKS[self.task].model(self.model).training, given_here, parse(self.scheme))

    @property
    def measure(self) -> Measure:
        """The measure that the task's models are judged by."""
        return MEASURES[TASKS[self.task].measure]

    def load_data(self) -> Data:
        """The task's examples."""
        return TASKS[self.task].load(self.data, self.training.context)

    def num_steps(self, num_examples: int, num_workers: int) -> int:
        """The steps to train in all."""
        if self.epochs is None:
            return self.steps or DEFAULT_STEPS
        return max(1, round(self.epochs * num_examples / (self.training.batch * num_workers)))

    def facts(self) -> dict[str, Any]:
        """The job as plain values, for the records."""
        return {option.name: _plain(getattr(self, option.name)) for option in fields(self)}

    def words(self) -> list[str]:
        """The command that makes this job again, without its program."""
        return ["train", *self.arguments()]

    def arguments(self) -> list[str]:
        """The command-line arguments that make this job again."""
        words = []
        for option in fields(Job):
            value = getattr(self, option.name)
            name = f"--{option.name.replace('_', '-')}"
            if value is True:
                words.append(name)
            elif value is not None and value is not False:
                words += [name, str(value)]
        return words


def _betas(text: str) -> tuple[float, float]:
    try:
        first, second = (float(word) for word in text.split(","))
    except ValueError:
        first = second = math.nan
    if not (0 <= first < 1 and 0 <= second < 1):
        raise TaskError(f"--betas is {text!r}; give two numbers in [0, 1) with a comma, as in --betas 0.9,0.95")
    return first, second


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
