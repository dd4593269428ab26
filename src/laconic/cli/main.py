"""Every command in one parser, and what each run of one needs: its exit code, and errors as one line."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from laconic.cli import completion, doctor, members, schemes
from laconic.cli.console import is_worker, say
from laconic.errors import LaconicError, nearest

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
Parse = Callable[[Sequence[str]], argparse.Namespace]

ENTRY_POINTS = "laconic.commands"
OF_THE_LAB = ("train", "compare", "plan", "report", "inspect", "lab", "bench", "chaos", "soak", "demo")
_INTERRUPTED = 130


class _ToStderr(logging.Handler):
    """Writes what the library logs as lines of the command, to whatever stderr is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"laconic: {self.format(record)}")


_TO_STDERR = _ToStderr()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"laconic: {message} ({self.prog} --help lists the options)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The options; an error with the nearest name where the command has none of that name."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = completion.subcommands(self).get(getattr(options, "command", ""), self)
            word = unknown[0].partition("=")[0]
            is_option = word.startswith("-")
            cure = nearest(word, completion.words_of(command)) if is_option else "nothing more is taken"
            command.error(f"{'unknown option' if is_option else 'unexpected'} {word!r}; {cure}")
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(f"unknown command {value!r}; {nearest(value, list(action.choices))}")
        super()._check_value(action, value)


def all_commands() -> argparse.ArgumentParser:
    """The parser of every command and option; the documentation lists them from it."""
    from laconic import __version__

    parser = _Parser(prog="laconic", description="PyTorch data-parallel training that sends less.")
    parser.add_argument("--version", action="version", version=f"laconic {__version__}")
    commands: Commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (schemes, doctor, members):
        module.add_parser(commands)
    completion.add_parser(commands, all_commands)
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        entry.load()(commands, parser.parse_args)
    for name in OF_THE_LAB:
        if name not in commands.choices:
            absent = commands.add_parser(name, add_help=False, prefix_chars="\0")  # whatever follows is for the lab
            absent.add_argument("words", nargs=argparse.REMAINDER)
            absent.set_defaults(run=_needs_the_lab)
    return parser


def _needs_the_lab(options: argparse.Namespace) -> int:
    raise LaconicError(
        f"`laconic {options.command}` is a command of the lab; pip install ./lab in the checkout, or where "
        "laconic came from an index pip install 'laconic[lab]'"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _open_closed_streams()
    logging.getLogger("laconic").addHandler(_TO_STDERR)
    try:
        try:
            given = list(sys.argv[1:] if arguments is None else arguments)
            options = all_commands().parse_args(given)
            options.given = given  # for commands that start workers under the same words
            code: int = options.run(options)
        finally:
            sys.stdout.flush()  # here, where an error can be told
    except LaconicError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _INTERRUPTED if is_worker() else _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _drop_stdout()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_stdout()
        return _fail(f"cannot write the result ({error.strerror}); free some space, or send it elsewhere", 2)
    return code


def run() -> NoReturn:
    """Run the command of this process, and end it."""
    code = main()
    if is_worker():
        # A thread of Gloo that frees a tensor while the interpreter is torn down aborts the process (torch 2.13), and
        # DDP keeps its group, and so those threads, to the end. Nothing is left to be written by now.
        os._exit(code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Where a stream was closed (2>&-), let it lead nowhere: print() would write to stdout instead."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)  # another file may have its number by now
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # at that number, the lowest that is free
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is quiet too


def _fail(message: str, code: int) -> int:
    say(f"laconic: {message}")
    return code
