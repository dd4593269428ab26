"""Published systems and controls, each as five answers.

A recipe is a short function; its keyword parameters are what the command line takes after the colon.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from laconic.errors import SchemeError
from laconic.exchange import AllGather, AllReduce, Silent
from laconic.memory import MomentumResidual, Residual
from laconic.quantize import BF16
from laconic.scheme import COMPOSED, PARTS, AnyScheme, Scheme, TorchHook, build, compose, part
from laconic.select import Everything, TopK
from laconic.text import pairs, write_pairs
from laconic.trigger import EveryStep, Ramp, Trigger, WarmUp

RECIPES: dict[str, Callable[..., AnyScheme]] = {}

R = TypeVar("R", bound=Callable[..., AnyScheme])


def recipe(function: R) -> R:
    """Register a recipe under its name, and label what it makes with the text that makes it again."""
    name = function.__name__.replace("_", "-")

    @functools.wraps(function)
    def labelled(**arguments: Any) -> AnyScheme:
        made = function(**arguments)
        given = write_pairs({key: arguments[key] for key in inspect.signature(function).parameters if key in arguments})
        object.__setattr__(made, "label", f"{name}:{given}" if given else name)
        return made

    RECIPES[name] = labelled
    return labelled  # type: ignore[return-value]


def parse(text: str) -> AnyScheme:
    """The scheme that a text names: `topk:rho=0.01,quantize=bf16`, or `scheme:select=...,exchange=...`."""
    name, _, rest = text.strip().partition(":")
    if name == COMPOSED:
        arguments = pairs(rest)
        for question in arguments:
            if question not in PARTS:
                raise SchemeError(f"scheme has no question {question}; it asks {', '.join(PARTS)}")
        return compose(**arguments)
    if name not in RECIPES:
        raise SchemeError(f"no scheme is called {name!r}; write one of {', '.join(RECIPES)}, or {COMPOSED}:select=...")
    made: AnyScheme = build(RECIPES[name], pairs(rest), name)
    return made


@recipe
def dense() -> Scheme:
    """Everything in the gradient's own type, all-reduced: the truth."""
    return Scheme(select=Everything(), exchange=AllReduce())


@recipe
def bf16() -> Scheme:
    """Everything in 16 bits, all-reduced: what users have for free, and the one to beat."""
    return Scheme(select=Everything(), quantize=BF16(), exchange=AllReduce())


@recipe
def silent() -> Scheme:
    """Nothing is sent: the upper bound on speed; the workers drift apart."""
    return Scheme(select=Everything(), exchange=Silent())


@recipe
def topk(
    *, rho: float = 0.01, quantize: str = "bf16", per: str = "bucket", warmup: int = 0, search: str = "threshold"
) -> Scheme:
    """Exact top-k with error feedback, all-gathered; the first `warmup` steps go dense."""
    return Scheme(
        select=TopK(rho=rho, per=per, search=search),
        quantize=part("quantize", quantize),
        memory=Residual(),
        exchange=AllGather(),
        trigger=_warmed(warmup),
    )


@recipe
def laplace(
    *, rho: float = 0.01, quantize: str = "bf16", per: str = "bucket", warmup: int = 0, search: str = "threshold"
) -> Scheme:
    """Top-k by an estimated threshold, corrected to exactly k; `search=bisection` is the paper's, in several passes."""
    return topk(rho=rho, quantize=quantize, per=per, warmup=warmup, search=search)


@recipe
def dgc(
    *, rho: float = 0.01, momentum: float = 0.9, ramp: int = 20, quantize: str = "bf16", per: str = "bucket"
) -> Scheme:
    """Deep Gradient Compression: top-k with momentum correction, reached in stages of `ramp` steps."""
    return Scheme(
        select=TopK(rho=rho, per=per),
        quantize=part("quantize", quantize),
        memory=MomentumResidual(momentum=momentum),
        exchange=AllGather(),
        trigger=Ramp(steps=ramp) if ramp else EveryStep(),
    )


@recipe
def torch_fp16() -> TorchHook:
    """PyTorch's fp16_compress_hook, unchanged: a control."""
    return TorchHook(hook="fp16")


@recipe
def torch_powersgd(*, rank: int = 1, start: int = 2) -> TorchHook:
    """PyTorch's powerSGD_hook, unchanged, from step `start` on: a control; over Gloo it needs one large bucket."""
    return TorchHook(hook="powersgd", rank=rank, start=start)


def _warmed(steps: int) -> Trigger:
    return WarmUp(steps=steps) if steps else EveryStep()
