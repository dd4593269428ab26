"""The frozen half: answers that are checked together, printed and parsed."""

import re
from inspect import signature
from typing import Any, cast

from laconic.errors import SchemeError, nearest
from laconic.scheme.models import GossipScheme, OuterScheme
from laconic.scheme.parts import COMPOSED, PARTS, RECIPES, build, pairs, part, recipe, score_name, write_part
from laconic.scheme.scheme import Scheme, TorchHook

AnyScheme = Scheme | GossipScheme | OuterScheme | TorchHook


def parse(text: AnyScheme | str) -> AnyScheme:
    """Read the scheme that a text names.

    Args:
        text: `topk:rho=0.01,quantize=bf16`, or `scheme:select=...,exchange=...`; a scheme is returned as it is.

    Returns:
        A frozen scheme, as attach() and follow() take it.

    Raises:
        SchemeError: A name is unknown, or the answers do not fit; the message holds the nearest name, or the cure.

    Example:
        >>> laconic.parse("topk:rho=0.01") == laconic.recipes.topk(0.01)
        True
    """
    if not isinstance(text, str):
        return text
    name, _, rest = text.strip().partition(":")
    if name == COMPOSED:
        arguments = pairs(rest)
        if unknown := [question for question in arguments if question not in PARTS]:
            raise SchemeError(f"scheme has no question {unknown[0]!r}; {nearest(unknown[0], PARTS)}")
        return compose(**arguments)
    if (first := re.split("[(, ]", name)[0]) != name and first in RECIPES:
        raise SchemeError(f"{text!r} is no scheme; write {first}:key=value,key=value")
    if name not in RECIPES:
        names = [known for known in RECIPES if known != "silent"]  # what sends nothing is not what was meant
        raise SchemeError(f"unknown recipe {name!r}; {nearest(name, names, f', or {COMPOSED}:select=...')}")
    example = f"{name}:{next(iter(signature(RECIPES[name]).parameters), 'key')}=..."
    return cast(AnyScheme, build(RECIPES[name], pairs(rest, example), name))


def compose(**answers: Any) -> Scheme | GossipScheme | OuterScheme:
    """A scheme from its answers, as texts or parts, of the kind that they make it; those left out are the defaults."""
    parts = {question: part(question, answer) for question, answer in answers.items()}
    of_what = parts["exchange"].of_what if "exchange" in parts else "gradients"
    trigger = parts.get("trigger")
    if "outer" in parts or of_what == "drift" or (trigger is not None and "drift" in trigger.of_what):
        others = {name: parts.pop(key) for key, name in (("trigger", "when"), ("outer", "then")) if key in parts}
        return OuterScheme(exchanged=Scheme(**parts), **others)
    if of_what == "gradients":
        return Scheme(**parts)
    if "memory" in parts:
        raise SchemeError("gossip keeps no residual; leave memory out")
    return GossipScheme(**parts)
