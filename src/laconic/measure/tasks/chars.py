"""The next character of a text."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from laconic.errors import TaskError
from laconic.measure.tasks.models import GPT
from laconic.measure.tasks.task import Data, Task

_CONTEXT = 64
_TEST_SHARE = 0.1
_MAX_TEST_WINDOWS = 512


def _load(path: Path | None) -> Data:
    if path is None or not path.is_file():
        given = f"{path} is not a file" if path else "this task needs a text"
        raise TaskError(f"{given}; give --data a text file")
    text = path.read_text(encoding="utf-8", errors="replace")
    if len(text) < 20 * _CONTEXT:
        raise TaskError(f"{path} has {len(text)} characters; give a text of at least {20 * _CONTEXT}")
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text])
    cut = int(len(tokens) * (1 - _TEST_SHARE))
    test_inputs, test_targets = _windows(tokens[cut:], _CONTEXT)
    return Data(
        *_windows(tokens[:cut], 1),
        test_inputs[:_MAX_TEST_WINDOWS],
        test_targets[:_MAX_TEST_WINDOWS],
        prepare=lambda tokens: tokens,
    )


def _windows(tokens: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets): each window of characters, and the same one character later; views, not copies."""
    return tokens[:-1].unfold(0, _CONTEXT, stride), tokens[1:].unfold(0, _CONTEXT, stride)


def _gpt(data: Data) -> GPT:
    highest = max(int(data.train_inputs.max()), int(data.test_inputs.max()), int(data.test_targets.max()))
    return GPT(vocabulary=highest + 1, context=_CONTEXT)


CHARS = Task("chars", {"gpt": _gpt}, _load, lr=0.5, momentum=0.5, batch=16)
