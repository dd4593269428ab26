"""laconic lab: hosts on this machine, on links as slow as asked for."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from laconic.cli import table
from laconic_lab.errors import LabError
from laconic_lab.network import NETWORKS, Lab, LabSpec, Link, labs, noted_signals, remove_abandoned, run
from laconic_lab.network.spec import parse_loss, parse_seconds

_MAKE_ONE = "make one with `laconic lab up --hosts 4 --link 100mbit`"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `lab` and what can be done with it."""
    lab = commands.add_parser("lab", help="make hosts on this machine, on slow links, and run commands across them")
    actions = lab.add_subparsers(dest="action", metavar="ACTION", required=True)

    runs = actions.add_parser("run", help="run a command once per host; a lab of its own, or the standing one")
    add_spec(runs, "of a lab for this run; without it, the standing lab is used")
    runs.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, and its arguments")
    runs.set_defaults(run=run_command)

    up = actions.add_parser("up", help="make a lab that stays until `down`")
    add_spec(up, "to make")
    up.set_defaults(run=run_up)

    down = actions.add_parser("down", help="remove the standing lab, and what killed runs left")
    down.add_argument("--force", action="store_true", help="also while a command runs in it, which is then ended")
    down.set_defaults(run=run_down)

    status = actions.add_parser("status", help="list labs, hosts, links and bytes so far")
    status.add_argument("--json", action="store_true", help="one JSON object on stdout")
    status.set_defaults(run=run_status)

    for name, does in (("cut", "take the link of a host down"), ("heal", "bring the link of a host back")):
        action = actions.add_parser(name, help=does)
        action.add_argument("host", type=int, metavar="HOST", help="a host's number, from 0")
        action.set_defaults(run=run_cut_or_heal)


def run_command(args: argparse.Namespace) -> int:
    """Run a command on every host of a new lab, or of the standing one."""
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise LabError("there is no command; write it last: `laconic lab run --hosts 4 --link 100mbit -- torchrun ...`")
    with noted_signals() as signals:
        if args.hosts is not None:
            with Lab.create(spec_of(args)) as lab:
                return _run_in(lab, argv, signals)
        if is_shaped(args):
            raise LabError("--link and the like are for a new lab; give --hosts too, or none for the standing lab")
        return _run_in(_standing(labs()), argv, signals)


def run_up(args: argparse.Namespace) -> int:
    """Make a lab that no process owns."""
    if args.hosts is None:
        raise LabError("--hosts is missing; write `laconic lab up --hosts 4 --link 100mbit`")
    if any(lab.is_standing for lab in labs()):
        raise LabError("a lab is standing already; remove it with `laconic lab down` first")
    with noted_signals() as signals:
        lab = Lab.create(spec_of(args), standing=True)
        if signals:
            lab.close()
            return 128 + signals[0]
    print(_describe([_facts(lab)]))
    print("run on all with `laconic lab run -- COMMAND`, remove the lab with `laconic lab down`,", file=sys.stderr)
    print(f"enter host 0 with `{lab.hosts[0].entering} bash`", file=sys.stderr)
    return 0


def run_down(args: argparse.Namespace) -> int:
    """Remove the standing lab, unless a command runs in it, and abandoned ones; those of live processes stay."""
    with noted_signals():
        gone = remove_abandoned()
        for lab in labs():
            if lab.is_standing:
                if not args.force and (running := lab.pids()):
                    pids = ", ".join(map(str, running[:4])) + ", ..." * (len(running) > 4)
                    raise LabError(f"something runs in lab {lab.id} (pid {pids}); end it first, or give --force")
                lab.close()
                gone.append(lab.id)
    print(f"removed {', '.join(gone)}" if gone else "no lab is standing", file=sys.stderr)
    return 0


def run_status(args: argparse.Namespace) -> int:
    """List every lab of this machine."""
    listed = []
    for lab in labs():
        with suppress(LabError):  # who made it is just removing it
            listed.append(_facts(lab))
    if args.json:
        print(json.dumps({"labs": listed}))
    elif listed:
        print(_describe(listed))
        if any(lab["left_over"] for lab in listed):
            print("what is left over is of runs that were killed; `laconic lab down` removes it", file=sys.stderr)
    else:
        print(f"no lab is there; {_MAKE_ONE}", file=sys.stderr)
    return 0


def run_cut_or_heal(args: argparse.Namespace) -> int:
    """Take a link of the standing lab, or of the only one that runs, down or up."""
    listed = [lab for lab in labs() if not lab.is_abandoned]
    lab = listed[0] if len(listed) == 1 else _standing(listed)
    if args.action == "cut":
        lab.cut(args.host)
    else:
        lab.heal(args.host)
    return 0


def add_spec(parser: argparse._ActionsContainer, use: str) -> None:
    """Add --hosts, and what shapes their links."""
    parser.add_argument("--hosts", type=int, metavar="N", help=f"hosts {use}")
    parser.add_argument(
        "--link", type=Link.parse, metavar="RATE", help="10mbit, 2.5gbit, 500kbit; default none: unshaped"
    )
    parser.add_argument("--delay", type=parse_seconds, metavar="TIME", help="one way between two hosts, like 20ms")
    parser.add_argument("--jitter", type=parse_seconds, metavar="TIME", help="most by which a delay is off, like 2ms")
    parser.add_argument("--loss", type=parse_loss, metavar="SHARE", help="packets lost between two hosts, like 0.1%%")
    kinds = "; ".join(f"{name}: {link}" for name, link in NETWORKS.items()).replace("%", "%%")
    parser.add_argument("--network", choices=NETWORKS, help=f"a link to start from ({kinds})")
    parser.add_argument(
        "--link-of",
        type=_link_of,
        action="append",
        default=[],
        metavar="HOST=LINK",
        help="another link for one host, like 3=50mbit or 3=50mbit,delay=20ms,jitter=2ms,loss=0.1%%",
    )
    parser.add_argument(
        "--slow",
        type=_slow_host,
        action="append",
        default=[],
        metavar="HOST=F",
        help="a host that computes F times slower, like 3=4: after a step it sleeps for F - 1 times its CPU seconds",
    )


def is_shaped(args: argparse.Namespace) -> bool:
    """Return whether something is asked of links."""
    return bool(args.network or args.link or args.link_of or args.slow or roughness(args))


def roughness(args: argparse.Namespace) -> dict[str, Any]:
    """The delay, jitter and loss that were asked for, as fields of a link."""
    given = {"delay_s": args.delay, "jitter_s": args.jitter, "loss": args.loss}
    return {name: value for name, value in given.items() if value is not None}


def _link_of(text: str) -> tuple[int, Link]:
    index, equals, rate = text.partition("=")
    if not equals or not index.isdecimal():
        raise LabError(f"--link-of {text} is not HOST=LINK; write one like 3=50mbit")
    return int(index), Link.parse(rate)


def _slow_host(text: str) -> tuple[int, float]:
    index, _, slowdown = text.partition("=")
    try:
        return int(index), float(slowdown)
    except ValueError:
        raise LabError(f"--slow {text} is not HOST=F; write one like 3=4") from None


def spec_of(args: argparse.Namespace) -> LabSpec:
    """The lab that was asked for."""
    link = NETWORKS[args.network] if args.network else args.link or Link()
    if args.network and args.link:
        link = replace(link, bits_per_s=args.link.bits_per_s)
    hosts = 2 if args.hosts is None else args.hosts
    return LabSpec(hosts, replace(link, **roughness(args)), dict(args.link_of), dict(args.slow))


def _standing(listed: list[Lab]) -> Lab:
    for lab in listed:
        if lab.is_standing:
            return lab
    raise LabError(f"no lab is standing; {_MAKE_ONE} (`lab run` makes its own with --hosts)")


def _run_in(lab: Lab, argv: list[str], signals: list[int]) -> int:
    before = [host.counters() for host in lab.hosts]
    code = run(lab, argv, signals)
    after = [host.counters() - earlier for host, earlier in zip(lab.hosts, before, strict=True)]
    carried = [f"[{i}] {count.bytes_out:,} {count.bytes_in:,}" for i, count in enumerate(after)]
    print(f"laconic: bytes out and in by host: {'; '.join(carried)}", file=sys.stderr)
    return code


def _facts(lab: Lab) -> dict[str, Any]:
    return {
        "id": lab.id,
        "owner_pid": lab.owner.pid if lab.owner else None,
        "left_over": lab.is_abandoned,
        "hosts": [
            {
                "host": host.index,
                "namespace": host.namespace,
                "address": host.address,
                "link": str(host.link),
                **({} if lab.is_abandoned else {"cut": host.is_cut, **asdict(host.counters())}),
            }
            for host in lab.hosts
        ],
    }


def _describe(listed: list[dict[str, Any]]) -> str:
    head = ["lab", "owner", "host", "namespace", "address", "link", "state", "bytes out", "bytes in"]
    rows = []
    for lab in listed:
        owner = f"pid {lab['owner_pid']}" if lab["owner_pid"] else "standing"
        for host in lab["hosts"]:
            where = [str(host[key]) for key in ("host", "namespace", "address", "link")]
            if lab["left_over"]:  # perhaps half made or half removed, so nobody asks its links
                state = ["left over", "-", "-"]
            else:
                state = ["cut" if host["cut"] else "up", f"{host['bytes_out']:,}", f"{host['bytes_in']:,}"]
            rows.append([lab["id"], owner, *where, *state])
    return table(head, rows)
