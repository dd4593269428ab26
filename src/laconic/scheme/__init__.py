"""The frozen half: answers that are checked together, printed and parsed."""

from laconic.scheme.gossip import GossipScheme
from laconic.scheme.parts import COMPOSED, PARTS, part, write_part
from laconic.scheme.scheme import Scheme
from laconic.scheme.torch_hook import TorchHook

AnyScheme = Scheme | GossipScheme | TorchHook


def compose(**answers: str) -> Scheme | GossipScheme:
    """A scheme from the texts of its answers, of the kind that its exchange is of; those left out are the defaults."""
    made = {question: part(question, text) for question, text in answers.items()}
    if "exchange" not in made or made["exchange"].of_what == "gradients":
        return Scheme(**made)
    memory = made.pop("memory", None)
    scheme = GossipScheme(**made)
    if memory is not None:  # texts of an older version say it
        scheme.check_memory(memory)
    return scheme
