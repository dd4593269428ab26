"""A wrong argument is one line that tells what to write, before anything is opened or anyone waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.adapters import hook
from laconic.errors import SchemeError
from laconic.integrations import attach_or_follow

_MODEL = nn.Linear(2, 2)
_OPTIMIZER = torch.optim.SGD(_MODEL.parameters(), lr=0.1)
_TAKE_A_TIMEOUT: dict[str, Callable[..., Any]] = {
    "attach": lambda **timeout: laconic.attach(_MODEL, "topk:rho=0.01", **timeout),
    "attach, auto": lambda **timeout: laconic.attach(_MODEL, "auto", **timeout),
    "follow": lambda **timeout: laconic.follow(_MODEL, _OPTIMIZER, "streaming", **timeout),
    "follow, auto": lambda **timeout: laconic.follow(_MODEL, _OPTIMIZER, "auto", **timeout),
    "hook": lambda **timeout: hook("topk:rho=0.01", **timeout),
    "serve": lambda **timeout: laconic.serve("overlap", **timeout),
    "a trainer that attaches": lambda **timeout: attach_or_follow(_MODEL, _OPTIMIZER, "topk", **timeout),
    "a trainer that follows": lambda **timeout: attach_or_follow(_MODEL, _OPTIMIZER, "streaming", **timeout),
}


@pytest.mark.parametrize("call", _TAKE_A_TIMEOUT)
@pytest.mark.parametrize("timeout_s", [-1, 0, float("inf"), float("nan")])
def test_a_timeout_is_a_number_of_seconds(call: str, timeout_s: float) -> None:
    with pytest.raises(SchemeError, match=rf"^timeout_s is {timeout_s}; give seconds above 0, or leave it out for .*$"):
        _TAKE_A_TIMEOUT[call](timeout_s=timeout_s)
