"""laconic serve and laconic members: a run that members join over one port, and who is in it."""

from __future__ import annotations

import argparse
import logging
from contextlib import suppress

from laconic.cli.console import number, say, table, to_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands."""
    serve = commands.add_parser(
        "serve",
        help="serve a run that members join and leave (laconic.join)",
        description="Keep the model of a run, and average what its members learn. In each training script "
        'laconic.join("HOST:PORT", model, optimizer) joins. Ctrl-C or SIGTERM ends it; with --state it continues.',
        epilog="laconic serve --listen 0.0.0.0:7700 --state run --metrics :9100",
    )
    serve.add_argument("--listen", default="127.0.0.1:7700", metavar="HOST:PORT", help="address (default %(default)s)")
    serve.add_argument("--scheme", default="streaming:every=64", help="a scheme of outer steps (default %(default)s)")
    serve.add_argument("--quorum", type=int, default=1, metavar="K", help="fewest drifts of a round (default 1)")
    serve.add_argument(
        "--wait-budget",
        type=float,
        default=10.0,
        metavar="S",
        help="most seconds to wait for late members (default 10)",
    )
    serve.add_argument("--lockstep", action="store_true", help="wait for all members, so that a run repeats exactly")
    serve.add_argument(
        "--combine", default="mean", metavar="RULE", help="clipped, where members may send false drifts (default mean)"
    )
    serve.add_argument("--mask-bits", type=int, default=0, metavar="B", help="8 or 16: see sums of drifts alone")
    serve.add_argument("--state", metavar="DIR", help="keep the run in this folder, and continue one that is there")
    serve.add_argument("--tape", metavar="FILE", help="record what members send, so that the run can be replayed")
    serve.add_argument("--metrics", metavar="HOST:PORT", help="a page and Prometheus's metrics, over HTTP")
    serve.set_defaults(run=_serve)
    members = commands.add_parser("members", help="list the members of a run")
    members.add_argument("address", metavar="HOST:PORT", help="the server's")
    members.add_argument("--json", action="store_true", help="everything, as JSON")
    members.set_defaults(run=_members)


def _serve(options: argparse.Namespace) -> int:
    from laconic.members import MemberServer, PageServer

    logging.getLogger("laconic.members").setLevel(logging.INFO)  # who joined, left, was lost or refused
    server = MemberServer(
        options.scheme,
        options.listen,
        quorum=options.quorum,
        wait_budget_s=options.wait_budget,
        is_lockstep=options.lockstep,
        combine=options.combine,
        mask_bits=options.mask_bits,
        state=options.state,
        tape=options.tape,
    )
    with server, suppress(KeyboardInterrupt):
        page = PageServer(server, options.metrics) if options.metrics else None
        say(f"laconic: members dial {server.address}; stop with Ctrl-C")
        if page is not None:
            say(f"laconic: the page is at http://{page.address}/")
        server.wait()
    return 0


def _members(options: argparse.Namespace) -> int:
    from laconic.members import run_stats

    stats = run_stats(options.address)
    if options.json:
        print(to_json(stats))
        return 0
    rows = [
        [
            member["id"],
            member["address"] if member["is_there"] else "gone",
            f"{member['seen_s_ago']:.0f} s ago",
            number(member["tokens"], ",d"),
            number(member["rounds"], ",d"),
            number(member["late"], ",d"),
            number(member["residual_norm"], ".3g"),
            number(member["share"], ".2f"),
            number(member.get("loss"), ".4g"),
        ]
        for member in stats["members"]
    ]
    print(f"{stats['scheme']}: {stats['rounds']} rounds, {stats['tokens']:,} tokens, {stats['num_members']} members")
    print(
        table(["member", "address", "seen", "tokens", "rounds", "late", "residual", "share", "loss"], rows, num_left=2)
    )
    return 0
