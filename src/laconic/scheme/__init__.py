"""The frozen half: answers that are checked together, printed and parsed."""

from laconic.scheme.gossip import GossipScheme
from laconic.scheme.outer import OuterScheme
from laconic.scheme.parts import COMPOSED, PARTS, part, write_part
from laconic.scheme.scheme import Scheme
from laconic.scheme.torch_hook import TorchHook

AnyScheme = Scheme | GossipScheme | OuterScheme | TorchHook


def compose(**answers: str) -> Scheme | GossipScheme | OuterScheme:
    """A scheme from the texts of its answers, of the kind that they make it; those left out are the defaults."""
    made = {question: part(question, text) for question, text in answers.items()}
    of_what = made["exchange"].of_what if "exchange" in made else "gradients"
    if "outer" in made or of_what == "drift" or ("trigger" in made and made["trigger"].in_rounds):
        return OuterScheme(**made)
    if of_what == "gradients":
        return Scheme(**made)
    memory = made.pop("memory", None)
    scheme = GossipScheme(**made)
    if memory is not None:  # texts of an older version say it
        scheme.check_memory(memory)
    return scheme
