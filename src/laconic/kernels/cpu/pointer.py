"""Tensors as raw pointers, after the checks without which a raw pointer crashes."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.checks import check_vector


def pointer(name: str, x: Tensor, dtype: torch.dtype, length: int | None = None, *, dims: int = 1) -> int:
    """The address of `length` entries of this type, side by side on the CPU; of any number if none is given."""
    check_vector(x, dtype, x.numel() if length is None else length, name, dims=dims)
    if x.device.type != "cpu":
        raise KernelError(f"{name} is on {x.device}; give a tensor on the CPU")
    return x.data_ptr()


def check_apart(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two vectors that share memory."""
    start = x.data_ptr()
    other_start = other.data_ptr()
    if start < other_start + other.nbytes and other_start < start + x.nbytes:
        raise KernelError(f"{name} and {other_name} overlap; give tensors of their own")


def check_reach(positions: Tensor, n: int) -> None:
    """Refuse ascending positions of which the first or the last is not under n."""
    if not positions.numel():
        return
    first, last = positions.numpy()[[0, -1]].tolist()
    if not 0 <= first <= last < n:
        raise KernelError(f"positions reach from {first} to {last}; give ascending under {n}")


def num_threads() -> int:
    """As many threads as torch uses, unless the calling thread was given a number of its own."""
    given: int = getattr(_here, "num_threads", 0)
    return given or torch.get_num_threads()


def give_threads(number: int) -> None:
    """Let native kernels start so many in the calling thread, whatever torch uses there: theirs end with a call."""
    _here.num_threads = number


_here = threading.local()
