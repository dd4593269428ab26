"""laconic schemes: every recipe, its parameters, one line of meaning."""

from __future__ import annotations

import argparse
import inspect

from laconic.errors import SchemeError
from laconic.layout import Layout
from laconic.paths import bits_per_entry
from laconic.recipes import RECIPES, parse
from laconic.scheme import COMPOSED, PARTS, AnyScheme

_BUCKET = Layout.of(["weight"], [(1000, 1000)])  # large enough for headers not to show


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic schemes`."""
    parser = commands.add_parser("schemes", help="list every scheme with its parameters")
    parser.add_argument("scheme", nargs="*", metavar="SCHEME", help="tell the bits of these alone")
    parser.add_argument(
        "--workers", type=int, default=4, metavar="M", help="workers among whom bits are counted (default 4)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    if arguments.workers < 2:
        raise SchemeError(f"--workers is {arguments.workers}; give 2 or more")
    for text in arguments.scheme:
        print(f"{text}: {_bits(parse(text), arguments.workers)} bits an entry among {arguments.workers} workers")
    if not arguments.scheme:
        _print_all(arguments.workers)
    return 0


def _print_all(num_workers: int) -> None:
    rows = [
        (name, _bits(recipe(), num_workers), (inspect.getdoc(recipe) or "").partition("\n")[0], _parameters(name))
        for name, recipe in RECIPES.items()
    ]
    rows.append((COMPOSED, "", "Your own five answers, of those below.", f"{', '.join(PARTS)}"))
    print(f"Bits an entry among {num_workers} workers, as an all-reduce of as many bytes; then what it does.\n")
    for name, bits, meaning, parameters in rows:
        print(f"{name:16}  {bits:>6}  {meaning}")
        if parameters:
            print(f"{'':16}  {'':6}  :{parameters}")
    print()
    for question, answers in PARTS.items():
        print(f"{question:9} {', '.join(_call(name, answer) for name, answer in answers.items())}")


def _bits(scheme: AnyScheme, num_workers: int) -> str:
    """What a scheme takes of the wire; PyTorch's hooks do not tell beforehand."""
    if scheme.is_torch_hook:
        return "-"
    if scheme.of_what == "models":
        return f"{scheme.bits_per_entry(_BUCKET, num_workers):.4g}"
    every = scheme.when.every if scheme.of_what == "drift" else 1
    return f"{bits_per_entry(scheme.exchanged, _BUCKET, num_workers) / every:.4g}"


def _parameters(name: str) -> str:
    return ",".join(f"{p.name}={p.default}" for p in inspect.signature(RECIPES[name]).parameters.values())


def _call(name: str, answer: object) -> str:
    parameters = inspect.signature(answer).parameters.values()  # type: ignore[arg-type]
    shown = ",".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    return f"{name}({shown})" if shown else name
