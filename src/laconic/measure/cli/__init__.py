"""The command line. Data goes to stdout, talk to stderr, and an error is one line that says what to do.

argparse, because `torchrun -m laconic train` must run on a node that has torch and numpy alone.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from laconic import __version__
from laconic.errors import LaconicError
from laconic.measure.cli import bench, chaos, compare, demo, doctor, inspect, lab, plan, report, schemes, train
from laconic.measure.train import is_worker

_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"laconic: {message} ({self.prog} --help lists the options)\n")


def all_commands() -> argparse.ArgumentParser:
    """The parser of every command and option; the documentation lists them from it."""
    parser = _Parser(prog="laconic", description="Data-parallel training that says less.")
    parser.add_argument("--version", action="version", version=f"laconic {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (train, compare, plan, report, inspect, lab, doctor, schemes, bench, chaos):
        module.add_parser(commands)
    demo.add_parser(commands, parser.parse_args)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _open_closed_streams()
    try:
        try:
            asked = all_commands().parse_args(arguments)
            code: int = asked.run(asked)
        finally:
            sys.stdout.flush()  # here, where what goes wrong can be said
    except LaconicError as error:
        return _say(str(error), 2)
    except KeyboardInterrupt:
        return _INTERRUPTED if is_worker() else _say("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _drop_stdout()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_stdout()
        return _say(f"cannot write the result ({error.strerror}); free some space, or send it elsewhere", 2)
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
    """Where a stream was closed (2>&-), let it lead nowhere: print() would send talk to stdout instead."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)  # another file may have its number by now
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # at that number, the lowest that is free
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is quiet too


def _say(message: str, code: int) -> int:
    print(f"laconic: {message}", file=sys.stderr, flush=True)
    return code
