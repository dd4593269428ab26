"""The next character of a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laconic.errors import TaskError
from laconic.measure.tasks.models import GPT
from laconic.measure.tasks.task import Data, Model, Task, Training

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


CHARS = Task("chars", {"gpt": Model(_gpt, Training(lr=0.5, batch=16, context=64))}, _load)
