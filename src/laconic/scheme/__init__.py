"""The frozen half: answers that are checked together, printed and parsed."""

from laconic.errors import SchemeError
from laconic.scheme.gossip import GossipScheme
from laconic.scheme.outer import OuterScheme
from laconic.scheme.parts import COMPOSED, PARTS, part, write_part
from laconic.scheme.scheme import Scheme, TorchHook

AnyScheme = Scheme | GossipScheme | OuterScheme | TorchHook


def compose(**answers: str) -> Scheme | GossipScheme | OuterScheme:
    """A scheme from the texts of its answers, of the kind that they make it; those left out are the defaults."""
    parts = {question: part(question, text) for question, text in answers.items()}
    of_what = parts["exchange"].of_what if "exchange" in parts else "gradients"
    trigger = parts.get("trigger")
    if "outer" in parts or of_what == "drift" or (trigger is not None and "drift" in trigger.of_what):
        others = {name: parts.pop(key) for key, name in (("trigger", "when"), ("outer", "then")) if key in parts}
        return OuterScheme(exchanged=Scheme(**parts), **others)
    if of_what == "gradients":
        return Scheme(**parts)
    if "memory" in parts:
        raise SchemeError("a gossip keeps its own model and no other memory; leave memory out")
    return GossipScheme(**parts)
