"""The frozen half: answers that are checked together, printed and parsed."""

from laconic.scheme.parts import COMPOSED, PARTS, build, part, write_part
from laconic.scheme.scheme import Scheme
from laconic.scheme.torch_hook import TorchHook

AnyScheme = Scheme | TorchHook


def compose(**answers: str) -> Scheme:
    """A scheme from the texts of its answers; those left out are the defaults of Scheme."""
    return Scheme(**{question: part(question, text) for question, text in answers.items()})


__all__ = ["COMPOSED", "PARTS", "AnyScheme", "Scheme", "TorchHook", "build", "compose", "part", "write_part"]
