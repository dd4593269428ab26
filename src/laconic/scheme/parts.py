"""Every answer to every question by the name that a text gives it."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from laconic.errors import SchemeError
from laconic.exchange import PATTERNS
from laconic.memory import MEMORIES
from laconic.outer import OUTERS
from laconic.quantize import GRIDS, QUANTIZERS, RESIDUES
from laconic.scheme.text import build, parse_call, write_call
from laconic.select import SELECTORS
from laconic.trigger import GOSSIP_TRIGGERS, ROUNDS, SCHEDULES

PARTS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "select": SELECTORS,
    "quantize": {**QUANTIZERS, **GRIDS, **RESIDUES},
    "memory": MEMORIES,
    "exchange": PATTERNS,
    "trigger": {**SCHEDULES, **GOSSIP_TRIGGERS, **ROUNDS},
    "outer": OUTERS,
}
COMPOSED = "scheme"  # the name under which a composition without a recipe is written


def part(question: str, text: str) -> Any:
    """The answer that a text like `bf16` or `topk(rho=0.01)` names."""
    name, arguments = parse_call(text)
    answers = PARTS[question]
    if name not in answers:
        raise SchemeError(f"{question}={name} is unknown; write one of {', '.join(answers)}")
    return build(answers[name], arguments, f"{question}={name}")


def write_part(question: str, answer: Any) -> str:
    """The text that `part` reads back."""
    names = {made: name for name, made in PARTS[question].items()}
    given = {f.name: getattr(answer, f.name) for f in fields(answer) if getattr(answer, f.name) != f.default}
    return write_call(names.get(type(answer), type(answer).__name__), given)
