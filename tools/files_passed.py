"""How many files and functions of the library one bucket passes in one step, as a profiler counts them.

python tools/files_passed.py topk overlap streaming gossip:rate=0.3,mode=matched [--names]

Two virtual workers exchange one bucket of gradients, or a small model, until what is made once has been made; then one
step of rank 0 is counted, the threads that it starts included. Virtual workers gossip in matched pairs alone.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import laconic
from laconic import Follower, GossipScheme, OuterScheme, Scheme, Session, parse
from laconic.layout import Bucket, Layout
from laconic.replicas import policy_for
from laconic.transport import InProcess, in_process

_HOME = Path(laconic.__file__).parent
_LAYOUT = Layout.of(["a", "b"], [(300, 50), (40,)])
_WARM_UP = 8  # steps; of models that train apart as many rounds


def main() -> None:
    """Print a line for each scheme, and with --names the files."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("schemes", nargs="+")
    arguments.add_argument("--names", action="store_true", help="list the files, with the number of functions in each")
    given = arguments.parse_args()
    for text in given.schemes:
        passed = functions_passed(text)
        files = [str(Path(code.co_filename).relative_to(_HOME)) for code in passed]
        print(f"{text}: {len(set(files))} files, {len(passed)} functions")
        for name in sorted(set(files)) if given.names else ():
            print(f"    {files.count(name):3} {name}")


def functions_passed(text: str) -> set[CodeType]:
    """The functions of the library that run in one step of rank 0 under a scheme."""
    counted: set[CodeType] = set()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(_HOME)):
            counted.add(frame.f_code)

    def work(transport: InProcess) -> None:
        step, num_steps = _stepping(text, transport)
        for _ in range(num_steps * _WARM_UP):
            step()
        if transport.rank == 0:
            threading.setprofile(count)
            sys.setprofile(count)
        for _ in range(num_steps):
            step()
        sys.setprofile(None)

    in_process(2, work)
    threading.setprofile(None)
    return counted


def _stepping(text: str, transport: InProcess) -> tuple[Callable[[], None], int]:
    """What makes a step, and how many of those one exchange takes."""
    scheme = parse(text)
    generator = torch.Generator().manual_seed(transport.rank)
    if isinstance(scheme, Scheme):
        session = Session(scheme, transport)

        def exchange() -> None:
            flat = torch.randn(_LAYOUT.num_entries, generator=generator)
            session.exchange_(Bucket(0, _LAYOUT, flat, is_last=True))

        return exchange, 1
    model = nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert isinstance(scheme, OuterScheme | GossipScheme)
    is_outer = isinstance(scheme, OuterScheme)
    options = {"in_background": False} if is_outer else {}
    follower = Follower(policy_for(model, optimizer, scheme, transport, **options))
    num_steps = scheme.when.every if isinstance(scheme, OuterScheme) else 4  # of gossip one in four exchanges

    def drift() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        follower.step()

    return drift, num_steps


if __name__ == "__main__":
    main()
