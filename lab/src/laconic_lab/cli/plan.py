"""laconic plan: what would pay for a task on this network, before it is trained."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from laconic.cli import as_worker, is_worker
from laconic.planning import CANDIDATES, Plan, candidate
from laconic_lab.cli.jobs import add_job_options, add_lab_options, given_options, lab_spec, launcher
from laconic_lab.errors import TaskError
from laconic_lab.network.spec import Link
from laconic_lab.records import RECORDS, make_writable, to_json
from laconic_lab.report import write_report
from laconic_lab.report.planned import PLAN
from laconic_lab.train.planning import LEAST_STEPS, NOT_PLANNED, PlanJob
from laconic_lab.train.worker import check_device, work_plan

_DEFAULT_STEPS = 1000
_PROBE_STEPS = 60


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic plan`."""
    parser = commands.add_parser(
        "plan",
        help="say beforehand which scheme would pay, and what limits",
        description="Measure a task's step, the network and what exchanges cost, and rank schemes by time to accuracy. "
        "* marks what is predicted. In a script of your own: laconic.plan(model, optimizer, step).",
    )
    parser.add_argument(
        "--scheme", action="append", metavar="NAME", help=f"a scheme; repeat it (default {len(CANDIDATES)} usual ones)"
    )
    parser.add_argument(
        "--if-workers", type=int, action="append", metavar="N", help="also say what N workers would pick; repeat it"
    )
    parser.add_argument(
        "--if-link",
        type=Link.parse,
        action="append",
        metavar="RATE",
        help="also say what links of this rate would pick; repeat it",
    )
    parser.add_argument(
        "--probe",
        type=int,
        nargs="?",
        const=_PROBE_STEPS,
        default=0,
        metavar="N",
        help=f"train N steps (default {_PROBE_STEPS}) under bf16 and the soonest three, to see what they cost in steps",
    )
    parser.add_argument(
        "--out", dest="folder", type=Path, metavar="DIR", help="write DIR/plan.json and DIR/report.html, a page"
    )
    add_lab_options(parser)
    add_job_options(parser, without=NOT_PLANNED)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the workers, or be one."""
    schemes = tuple(str(candidate(text)) for text in args.scheme or ())
    rates = {f"links of {link}": link.bits_per_s for link in args.if_link or () if link.bits_per_s}
    for number in args.if_workers or ():
        if number < 2:
            raise TaskError(f"--if-workers is {number}; give 2 or more")
    if args.probe and args.probe < LEAST_STEPS:
        raise TaskError(f"--probe is {args.probe}; give {LEAST_STEPS} or more steps, or chance decides")
    more = [word for text in schemes for word in ("--scheme", text)]
    more += [word for number in args.if_workers or () for word in ("--if-workers", str(number))]
    more += [word for link in args.if_link or () for word in ("--if-link", str(link))]
    more += ["--probe", str(args.probe)] if args.probe else []
    more += ["--out", str(args.folder)] if args.folder else []
    job = PlanJob(**{**given_options(args), "scheme": "bf16"}, more_words=tuple(more))
    if not is_worker():
        check_device(job)  # what is missing is said once
        job.load_data()
        if args.folder:
            _check_folder(args.folder)
        with launcher(lab_spec(args)) as start:
            return start(job)

    def tell(plan: Plan) -> None:
        others = {f"{number} workers": plan.what_if(workers=number) for number in args.if_workers or ()}
        others |= {rate: plan.what_if(bits_per_s=bits) for rate, bits in rates.items()}
        if args.folder:
            (args.folder / PLAN).write_text(_json(plan, others) + "\n", encoding="utf-8")
            print(f"laconic: the page is {write_report(args.folder)}", file=sys.stderr, flush=True)
        print(_json(plan, others) if job.json else _text(plan, others), flush=True)

    return as_worker(lambda: work_plan(job, schemes, job.steps or _DEFAULT_STEPS, tell, probe_steps=args.probe))


def _check_folder(folder: Path) -> None:
    make_writable(folder)
    if (folder / RECORDS).exists():
        raise TaskError(f"{folder} holds a run's records, whose page this would replace; give --out another folder")


def _json(plan: Plan, others: dict[str, Plan]) -> str:
    return to_json({**plan.as_dict(), "what_if": {name: other.as_dict() for name, other in others.items()}})


def _text(plan: Plan, others: dict[str, Plan]) -> str:
    lines = [str(plan)]
    for name, other in others.items():
        lines += ["", f"with {name}:", str(other)]
    return "\n".join(lines)
