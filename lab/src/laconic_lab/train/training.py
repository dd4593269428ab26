"""How a job's model is trained: the model's own settings, then what is asked, then what the scheme asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from laconic.scheme import AnyScheme, Scheme
from laconic_lab.errors import TaskError
from laconic_lab.tasks import Training
from laconic_lab.train.optimizer import MUON_OVER_ADAMW, OPTIMIZERS

_VOTE_LR = 1e-3  # of sparse-sign's authors
_OPTION_OF = {"momentum": ("sgd",), "betas": ("adamw", "muon")}  # which optimizers have it


def settled(defaults: Training, asked: Mapping[str, Any], scheme: AnyScheme) -> Training:
    """The settings of a run; `asked` are those that differ from the model's own.

    Where the scheme's memory carries momentum, the optimizer has none, and SGD's lr/(1-m) stays as it was. A vote is a
    step of the rate's own size in every entry: it takes no momentum and no norm, and then SGD's weight decay is
    decoupled, w -= lr*(vote + decay*w).
    """
    votes = isinstance(scheme, Scheme) and scheme.exchange.votes
    if votes:
        if asked.get("optimizer", "sgd") != "sgd":
            raise TaskError(f"{scheme} votes on the step itself; give --optimizer sgd, or another scheme")
        if "clip_norm" in asked:
            raise TaskError(f"{scheme} votes, and all its votes have one norm; leave --clip-norm out")
        defaults = replace(defaults, optimizer="sgd", lr=_VOTE_LR, clip_norm=math.inf)
    if asked.get("optimizer") == "muon" and defaults.optimizer == "adamw":
        defaults = replace(defaults, optimizer="muon", lr=MUON_OVER_ADAMW * defaults.lr)
    training = replace(defaults, **asked)
    _check(training, defaults, asked)
    if votes:
        return replace(training, momentum=0.0)
    carried = scheme.memory.momentum if isinstance(scheme, Scheme) else 0.0
    if not carried:
        return training
    if training.optimizer == "muon":
        raise TaskError(f"{scheme} carries momentum, and so does muon; give another --optimizer, or another scheme")
    if training.optimizer == "adamw":
        return replace(training, betas=(0.0, training.betas[1]))
    return replace(training, lr=training.lr * (1 - carried) / (1 - training.momentum), momentum=0.0)


def _check(training: Training, defaults: Training, asked: Mapping[str, Any]) -> None:
    """Raise, with what to write, where settings do not fit together."""
    if training.optimizer not in OPTIMIZERS:
        raise TaskError(f"--optimizer is {training.optimizer!r}; give {' or '.join(OPTIMIZERS)}")
    for name, optimizers in _OPTION_OF.items():
        if name in asked and training.optimizer not in optimizers:
            raise TaskError(f"--{name} is for {optimizers[0]}; leave it out, or give --optimizer {optimizers[0]}")
    if training.optimizer != defaults.optimizer and "lr" not in asked:
        raise TaskError(
            f"this model's learning rate, {defaults.lr:g}, is for {defaults.optimizer}; "
            f"give --lr with --optimizer {training.optimizer}"
        )
    if defaults.context is None and training.context is not None:
        raise TaskError("this task's examples are no sequences; leave --context out")
