"""Where Triton kernels are tried: a CUDA device, or the CPU with TRITON_INTERPRET=1; else importing this skips."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
ON_CUDA = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter, or needs CUDA itself")

tl: Any = importlib.import_module("triton.language")
interpreter: Any = importlib.import_module("triton.runtime.interpreter")


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, whatever the devices; any NaN equals any, as a GPU's sum has another payload than a CPU's."""
    one, other = one.cpu(), other.cpu()
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32) if x.dtype == torch.float32 else x


_patch_lang, _patch_lang_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    """numpy 2.4 no longer turns an array of one element into an int."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


class _Once:
    """Patch each set of modules once; else every call of a device function does it again, ten times as slowly."""

    def __init__(self) -> None:
        self.patched: set[frozenset[int]] = set()

    def __call__(self, fn: Any) -> Any:
        fn = getattr(fn, "original", fn)
        modules = (value for value in fn.__globals__.values() if isinstance(value, ModuleType))
        langs = frozenset(id(module) for module in modules if module in (tl, tl.core))
        if langs not in self.patched:
            self.patched.add(langs)
            _patch_lang(fn)
        return interpreter._LangPatchScope()


_ONCE = _Once()


@pytest.fixture(autouse=True)
def usable_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", _with_index)
        monkeypatch.setattr(interpreter, "_patch_lang", _ONCE)
