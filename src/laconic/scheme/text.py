"""Schemes as text: `name:key=value,key=other(key=value)`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from laconic.errors import SchemeError


def split(text: str, separator: str) -> list[str]:
    """Split at `separator` outside parentheses."""
    parts = []
    depth = 0
    start = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth != 0:
        raise SchemeError(f"the parentheses of {text!r} do not match")
    return [*parts, text[start:]] if text else []


def pairs(text: str) -> dict[str, str]:
    """{key: value} of `key=value,key=value`."""
    found: dict[str, str] = {}
    for item in split(text, ","):
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key or not value.strip():
            raise SchemeError(f"{item!r} is not key=value")
        if key in found:
            raise SchemeError(f"{key} is given twice")
        found[key] = value.strip()
    return found


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
    """Call `make` with `arguments` converted to the types that it annotates; an unknown key names those that exist."""
    known = inspect.signature(make).parameters
    hints = get_type_hints(make)
    for key in arguments:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise SchemeError(f"{where} has no parameter {key}; {takes}")
    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in arguments:
            raise SchemeError(f"{where} needs {key}=...")
    return make(**{key: _convert(text, hints[key], f"{where}: {key}") for key, text in arguments.items()})


def _convert(text: str, kind: Any, where: str) -> Any:
    kind = next(iter(get_args(kind)), kind)  # of `float | None`, since what is written down is not None
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        raise SchemeError(f"{where} is {text!r}; give {'a whole number' if kind is int else 'a number'}") from None
