"""The next character of a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laconic_lab.errors import TaskError
from laconic_lab.tasks.models import GPT, GPT2
from laconic_lab.tasks.task import Data, Model, Task, Training

_TEST_SHARE = 0.1
_MAX_TEST_WINDOWS = 512
_LEAST_WINDOWS = 20  # so that the tenth which is for testing holds one and its targets


def _load(path: Path | None, context: int | None) -> Data:
    assert context is not None  # every model of this task has one
    if path is None or not path.is_file():
        given = f"{path} is not a file" if path else "this task needs a text"
        raise TaskError(f"{given}; give --data a text file")
    text = path.read_text(encoding="utf-8", errors="replace")
    least = _LEAST_WINDOWS * context
    if len(text) < least:
        raise TaskError(f"{path} has {len(text)} characters; give a text of at least {least}, or a smaller --context")
    characters, places = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True)
    tokens = torch.from_numpy(places)  # as int64
    cut = int(len(tokens) * (1 - _TEST_SHARE))
    test_inputs, test_targets = _windows(tokens[cut:], context, context)
    return Data(
        *_windows(tokens[:cut], context, 1),
        test_inputs[:_MAX_TEST_WINDOWS],
        test_targets[:_MAX_TEST_WINDOWS],
        prepare=lambda tokens: tokens,
        vocabulary=len(characters),
    )


def _windows(tokens: Tensor, context: int, stride: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets): each window of characters, and the same one character later; views, not copies."""
    return tokens[:-1].unfold(0, context, stride), tokens[1:].unfold(0, context, stride)


def _gpt(data: Data) -> GPT:
    return GPT(data.vocabulary, context=data.train_inputs.shape[1])


def _gpt2(lr: float, num_layers: int, width: int, num_heads: int) -> Model:
    """A GPT-2 of some size, with the settings that language models of its time and since are trained with."""
    training = Training(
        lr=lr, batch=16, optimizer="adamw", betas=(0.9, 0.95), weight_decay=0.1, clip_norm=1.0, context=256
    )
    return Model(lambda data: GPT2(data.vocabulary, data.train_inputs.shape[1], width, num_layers, num_heads), training)


CHARS = Task(
    "chars",
    {
        "gpt": Model(_gpt, Training(lr=0.5, batch=16, context=64)),
        "gpt-tiny": _gpt2(1e-3, num_layers=5, width=128, num_heads=4),
        "gpt-small": _gpt2(6e-4, num_layers=6, width=384, num_heads=6),
        "gpt2": _gpt2(3e-4, num_layers=12, width=768, num_heads=12),
        "gpt2-medium": _gpt2(2e-4, num_layers=24, width=1024, num_heads=16),
    },
    _load,
    measure="loss",
)
