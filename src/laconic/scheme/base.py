"""What every scheme has: a text that names it, and what its exchange says of itself."""

from laconic.exchange import Pattern
from laconic.scheme.parts import COMPOSED, PARTS, write_pairs, write_part


class SchemeBase:
    """str() gives a text that `laconic.parse` reads back: the recipe's own form, or all answers."""

    exchange: Pattern
    label = ""  # set by a recipe; no field, so that dataclasses.replace() cannot carry it to another composition

    @property
    def of_what(self) -> str:
        """Gradients or models."""
        return self.exchange.of_what

    @property
    def talks(self) -> bool:
        """Whether anything is sent at all."""
        return self.exchange.talks

    @property
    def has_owners(self) -> bool:
        """Whether entries have owners who answer for them, and who may be servers."""
        return self.exchange.has_owners

    def __str__(self) -> str:
        answers = {question: getattr(self, question) for question in PARTS if hasattr(self, question)}
        return self.label or f"{COMPOSED}:" + write_pairs({q: write_part(q, answer) for q, answer in answers.items()})
