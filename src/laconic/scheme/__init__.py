"""The frozen half: answers that are checked together, printed and parsed."""

from typing import Any, cast

from laconic.errors import SchemeError, nearest
from laconic.scheme.gossip import GossipScheme
from laconic.scheme.outer import OuterScheme
from laconic.scheme.parts import COMPOSED, PARTS, RECIPES, build, pairs, part, recipe, score_name, write_part
from laconic.scheme.scheme import Scheme
from laconic.scheme.torch_hook import TorchHook

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
    if name not in RECIPES:
        raise SchemeError(f"unknown recipe {name!r}; {nearest(name, RECIPES, f', or {COMPOSED}:select=...')}")
    return cast(AnyScheme, build(RECIPES[name], pairs(rest), name))


def compose(**answers: Any) -> Scheme | GossipScheme | OuterScheme:
    """A scheme from its answers, as texts or parts, of the kind that they make it; those left out are the defaults."""
    made = {question: part(question, text) for question, text in answers.items()}
    of_what = made["exchange"].of_what if "exchange" in made else "gradients"
    if "outer" in made or of_what == "drift" or ("trigger" in made and made["trigger"].in_rounds):
        return OuterScheme(**made)
    if of_what == "gradients":
        return Scheme(**made)
    if "memory" in made:
        raise SchemeError("gossip keeps its models, and nothing besides; leave memory out")
    return GossipScheme(**made)
