"""laconic schemes: every recipe, its parameters, one line of meaning."""

from __future__ import annotations

import argparse
import inspect

from laconic.recipes import RECIPES
from laconic.scheme import COMPOSED, PARTS


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic schemes`."""
    parser = commands.add_parser("schemes", help="list every scheme with its parameters")
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Print the list."""
    rows = [(_form(name), inspect.getdoc(recipe) or "") for name, recipe in RECIPES.items()]
    rows.append((f"{COMPOSED}:...", "Your own five answers, of those below."))
    width = max(len(form) for form, _ in rows)
    for form, meaning in rows:
        print(f"{form:{width}}  {meaning}")
    print()
    for question, answers in PARTS.items():
        print(f"{question:9} {', '.join(_call(name, answer) for name, answer in answers.items())}")
    return 0


def _form(name: str) -> str:
    parameters = inspect.signature(RECIPES[name]).parameters.values()
    return name + (":" + ",".join(f"{p.name}={p.default}" for p in parameters) if parameters else "")


def _call(name: str, answer: object) -> str:
    parameters = inspect.signature(answer).parameters.values()  # type: ignore[arg-type]
    shown = ",".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    return f"{name}({shown})" if shown else name
