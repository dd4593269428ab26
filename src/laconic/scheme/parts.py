"""Every answer to every question by the name that a text gives it: `name:key=value,key=other(key=value)`."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

from laconic.errors import SchemeError, nearest
from laconic.exchange import PATTERNS
from laconic.memory import MEMORIES
from laconic.outer import OUTERS
from laconic.quantize import GRIDS, MODULO_CODES, QUANTIZERS
from laconic.select import SCORES, SELECTORS, Score
from laconic.trigger import GOSSIP_TRIGGERS, ROUNDS, SCHEDULES

PARTS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "select": SELECTORS,
    "quantize": {**QUANTIZERS, **GRIDS, **MODULO_CODES},
    "memory": MEMORIES,
    "exchange": PATTERNS,
    "trigger": {**SCHEDULES, **GOSSIP_TRIGGERS, **ROUNDS},
    "outer": OUTERS,
}
RECIPES: dict[str, Callable[..., Any]] = {}
COMPOSED = "scheme"  # the name under which a composition without a recipe is written

# What a parameter means, and its unit: the same in every recipe that has it.
ARGUMENTS = {
    "bits": "Bits of a code, its sign included.",
    "block": "Entries of a run, or those that share a norm (0: the whole bucket).",
    "chunk": "Entries of a chunk.",
    "cover": "Instead of rho: the number of workers that send an entry, on average.",
    "decay": "What a residual is multiplied by at each exchange, in (0, 1].",
    "delay": "Steps after which a result is applied, while the workers train on; 0: they wait.",
    "dense_below": "Parameters with fewer entries go whole.",
    "down_rho": "Share of entries that an answer holds; 3*rho unless given.",
    "every": "Steps between two exchanges of the same entries.",
    "exchange": 'Where it goes: a text like "server" or a part.',
    "explore": "Share of the selected entries that go in turn, whatever their score.",
    "form": 'Whether "both" factors go at each step, or "alternating" ones.',
    "fragments": "Parts of the model that are exchanged in turn.",
    "k": "Instead of rho: the number of entries sent of each bucket.",
    "levels": "Codes lie in [-levels, levels]; 0: as many as the bits allow.",
    "lr": "Learning rate of the outer step; 1 applies the mean as it is; None: 0.7, or 1 with momentum=auto.",
    "memory": 'What is kept: a text like "none" or a part.',
    "mode": "How positions are drawn (independent, cycle), or workers meet (free, paired, wait, matched).",
    "momentum": 'Momentum in [0, 1), or "auto" of outer steps; of gossip whether it is "local" or "quasi-global".',
    "peers": "Who may exchange with whom: uniform, ring, exponential, or pairs of ranks like 0-1+1-2.",
    "per": 'What is ranked at once, a "bucket" or a "parameter"; what gossip exchanges by itself, "model" or "tensor".',
    "pull": "Strength that draws the anchors of a pair together.",
    "quantize": 'How values are written: a text like "bf16" or a part.',
    "ramp": "Steps of each stage of falling density; 0: none.",
    "rank": "Columns of a factor.",
    "rate": "Models that leave a worker per step.",
    "ratio": "Levels of each scale over those of the one before.",
    "rho": "Share of entries sent, in (0, 1]; smaller sends less.",
    "scales": "Number of grids to select from, 2 to 4.",
    "score": "How the past weighs in: a name in laconic.select.SCORES, or one of those scores.",
    "search": "How the k-th value is found: threshold, bisection, sampled or torch.",
    "seed": "Seed of every draw, 0 or more.",
    "share": "Entries that share a scale.",
    "stages": "1: the network adds codes; 2: the workers do; 0: whichever sends less.",
    "start": "Step from which on gradients are compressed, 2 or more.",
    "steps": "Steps between two exchanges of a worker.",
    "strength": "The score's own parameter; 0: its default.",
    "tolerance": "Surplus of entries, over k, at which a search for the threshold ends.",
    "trigger": 'When a worker exchanges: a text like "period(steps=4)" or a part; unless given, `rate` decides.',
    "vote": "How signs are counted: majority, or weighted by each worker's record.",
    "warmup": "Steps at the start that send everything.",
    "weight": "What is kept is multiplied by this at each step, in (0, 1]; 0: nothing is kept.",
}

R = TypeVar("R", bound=Callable[..., Any])


def part(question: str, answer: Any) -> Any:
    """The answer that a text like `bf16` or `topk(rho=0.01)` names; an object is the answer itself."""
    if not isinstance(answer, str):
        return answer
    name, arguments = parse_call(answer)
    if name not in PARTS[question]:
        raise SchemeError(f"unknown {question} {name!r}; {nearest(name, PARTS[question])}")
    return build(PARTS[question][name], arguments, f"{question}={name}")


def read_parts(scheme: object) -> None:
    """Put the parts that texts name in the place of those texts, while a frozen scheme is made."""
    for question in PARTS:
        if isinstance(text := getattr(scheme, question, None), str):
            object.__setattr__(scheme, question, part(question, text))


def write_part(question: str, answer: Any) -> str:
    """The text that `part` reads back; a text is as good as the part that it names."""
    if isinstance(answer, str):
        return answer
    names = {made: name for name, made in PARTS[question].items()}
    given = {f.name: getattr(answer, f.name) for f in fields(answer) if getattr(answer, f.name) != f.default}
    return write_call(names.get(type(answer), type(answer).__name__), given)


def recipe(function: R) -> R:
    """Register a recipe under its name, and label what it makes with the text that makes it again."""
    name = function.__name__.replace("_", "-")
    signature = inspect.signature(function)

    @functools.wraps(function)
    def labelled(*positional: Any, **named: Any) -> Any:
        check_known(named, signature.parameters, name)
        arguments = signature.bind(*positional, **named).arguments
        made = function(**arguments)
        given = write_pairs({key: _as_text(key, value) for key, value in arguments.items()})
        object.__setattr__(made, "label", f"{name}:{given}" if given else name)
        return made

    labelled.__doc__ = _documented(function, signature)
    RECIPES[name] = labelled
    return labelled  # type: ignore[return-value]


def _as_text(parameter: str, value: Any) -> Any:
    if isinstance(value, Score):
        return score_name(value)
    return write_part(parameter, value) if parameter in PARTS else value


def _documented(function: Callable[..., Any], signature: inspect.Signature) -> str:
    """A recipe's own words, what its arguments mean, and an example: its first argument as it is by default."""
    given = write_pairs({name: repr(p.default) for name, p in list(signature.parameters.items())[:1]})
    name = function.__name__.replace("_", "-")
    sections = {
        "Args": [f"{key}: {ARGUMENTS.get(key, '')}" for key in signature.parameters],
        "Returns": ["A frozen scheme, whose str() is the text that makes it again."],
        "Raises": ["SchemeError: A number is out of range, or the answers do not fit; the message holds the cure."],
        "Example": [
            f">>> print(laconic.recipes.{function.__name__}({given}))",
            f"{name}:{given}".replace("'", "").removesuffix(":"),
        ],
    }
    written = [f"{title}:\n    " + "\n    ".join(lines) for title, lines in sections.items() if lines]
    return "\n\n".join([inspect.getdoc(function) or "", *written])


def score_name(score: str | Score) -> str:
    """The name of a score, by which a text gives it."""
    names = [name for name, known in SCORES.items() if score == name or score is known]
    if not names and isinstance(score, Score):
        raise SchemeError("this score has no name; give it one with laconic.select.SCORES['name'] = score")
    return names[0] if names else str(score)


def pairs(text: str, example: str = "one like key=value") -> dict[str, str]:
    """{key: value} of `key=value,key=value`; an error shows the example."""
    if text.count("(") != text.count(")"):
        raise SchemeError(f"the parentheses of {text!r} do not match")
    arguments: dict[str, str] = {}
    for item in re.split(r",(?![^(]*\))", text) if text else ():  # commas outside parentheses
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key or not value.strip():
            raise SchemeError(f"{item!r} is not key=value; write {example}")
        if key in arguments:
            raise SchemeError(f"{key} is given twice")
        arguments[key] = value.strip()
    return arguments


def parse_call(text: str) -> tuple[str, dict[str, str]]:
    """(name, arguments) of `name` or `name(key=value,...)`."""
    name, bracket, rest = text.strip().partition("(")
    if not bracket:
        return name, {}
    if not rest.endswith(")"):
        raise SchemeError(f"{text!r} is not name(key=value,...)")
    return name, pairs(rest[:-1])


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The inverse of parse_call."""
    return f"{name}({write_pairs(arguments)})" if arguments else name


def write_pairs(arguments: Mapping[str, Any]) -> str:
    """The inverse of pairs; what is None is as good as not given."""
    return ",".join(f"{key}={value}" for key, value in arguments.items() if value is not None)


def build(make: Callable[..., Any], arguments: Mapping[str, str], where: str) -> Any:
    """Call `make` with `arguments` converted to the types that it annotates."""
    known = inspect.signature(make).parameters
    check_known(arguments, list(known), where)
    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in arguments:
            raise SchemeError(f"{where} needs {key}=...")
    hints = get_type_hints(make)
    return make(**{key: _convert(text, hints[key], f"{where}: {key}") for key, text in arguments.items()})


def check_known(arguments: Iterable[str], known: Collection[str], where: str) -> None:
    """SchemeError with the nearest name for a parameter that there is not."""
    for key in arguments:
        if key not in known:
            raise SchemeError(f"{where} has no parameter {key!r}; {nearest(key, known) if known else 'it takes none'}")


def _convert(text: str, kind: Any, where: str) -> Any:
    kind = next(iter(get_args(kind)), kind)  # of `float | None`, since what is written down is not None
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        raise SchemeError(f"{where} is {text!r}; give {'a whole number' if kind is int else 'a number'}") from None
