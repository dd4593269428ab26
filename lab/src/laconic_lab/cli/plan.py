"""laconic plan: what would pay for a script or a task on this network, before it is trained."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from laconic.cli import as_worker, is_worker, say
from laconic.planning import CANDIDATES, Plan, candidate
from laconic_lab.cli.jobs import (
    add_job_options,
    add_lab_options,
    given_options,
    lab_spec,
    launcher,
    num_workers,
    say_if_busy,
)
from laconic_lab.errors import TaskError
from laconic_lab.network.spec import Link
from laconic_lab.records import RECORDS, make_writable, to_json
from laconic_lab.report import write_report
from laconic_lab.report.planned import PLAN
from laconic_lab.train import Job
from laconic_lab.train.worker import check_device, work_plan, work_script

_DEFAULT_STEPS = 1000
# A job's options that no plan depends on.
_NOT_PLANNED = (
    *("scheme", "auto", "servers", "server_timeout", "epochs", "flipped", "in_process", "eval_every"),
    *("no_pipeline", "no_checkpoint", "resume", "quiet", "out"),
)
_WITH_A_SCRIPT = {"scheme", "workers", "steps", "json"}  # options of a job that stand beside a script


@dataclass(frozen=True, kw_only=True)
class PlanJob(Job):
    """A job of which only the plan is asked."""

    given: tuple[str, ...]  # the command itself: a worker is asked the same

    def words(self) -> list[str]:
        return list(self.given)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic plan`."""
    parser = commands.add_parser(
        "plan",
        help="say which scheme would pay for your training script, before you change it",
        description="Run a training script, or a built-in task, for some steps, measure them, the network and what "
        "exchanges cost, and rank schemes by the time to the same loss. * marks what is predicted. The script stays as "
        "it is: it wraps its model in DistributedDataParallel, steps one optimizer, and ends once the plan is made.",
        epilog="""examples:
  laconic plan --workers 2 script.py                    your script on this machine
  laconic plan --hosts 4 --link 100mbit script.py       the same between hosts with slow links
  laconic plan --if-link 1gbit script.py --lr 0.1       what another link would want; --lr is the script's
  torchrun --nnodes 2 ... -m laconic plan script.py     on a real network
  laconic plan --task fashion-mnist --hosts 4 --link 100mbit --out DIR""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        "--out", dest="folder", type=Path, metavar="DIR", help="write DIR/plan.json and DIR/report.html, a page"
    )
    add_lab_options(parser)
    add_job_options(parser, without=_NOT_PLANNED)
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="your training script, and its own arguments"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the workers, or be one."""
    schemes = tuple(str(candidate(text)) for text in args.scheme or ())
    rates = {f"links of {link}": link.bits_per_s for link in args.if_link or () if link.bits_per_s}
    for number in args.if_workers or ():
        if number < 2:
            raise TaskError(f"--if-workers is {number}; give 2 or more")
    job = PlanJob(**{**given_options(args), "scheme": "bf16"}, given=tuple(args.given))
    if (int(os.environ["WORLD_SIZE"]) if is_worker() else num_workers(job, lab_spec(args))) < 2:
        raise TaskError("a plan is of what workers send to each other; give it 2 or more")
    if not is_worker():
        check_device(job.device)  # what is missing is said once
        _check_script(args) if args.script else job.load_data()
        if args.folder:
            _check_folder(args.folder)
        say_if_busy()
        with launcher(lab_spec(args)) as start:
            code = start(job)
        if args.script and not job.json:
            say(
                f"laconic: steps were timed on this machine's {os.cpu_count()} cores, shared by all workers; on other "
                f"hosts ask `torchrun ... -m laconic plan {args.script[0]}`"
            )
        return code

    def tell(plan: Plan) -> None:
        others = {f"{number} workers": plan.what_if(workers=number) for number in args.if_workers or ()}
        others |= {rate: plan.what_if(bits_per_s=bits) for rate, bits in rates.items()}
        if args.folder:
            (args.folder / PLAN).write_text(_json(plan, others) + "\n", encoding="utf-8")
            print(f"laconic: the page is {write_report(args.folder)}", file=sys.stderr, flush=True)
        print(_json(plan, others) if job.json else _text(plan, others), flush=True)

    if args.script:
        return as_worker(lambda: work_script(args.script, schemes, job.steps or _DEFAULT_STEPS, tell))
    return as_worker(lambda: work_plan(job, schemes, job.steps or _DEFAULT_STEPS, tell))


def _check_script(args: argparse.Namespace) -> None:
    """TaskError where there is no such script, or where it is told how to train."""
    if not Path(args.script[0]).is_file():
        raise TaskError(f"there is no script {args.script[0]}; give the path of the one that you start with torchrun")
    if late := [word for word in args.script[1:] if word.partition("=")[0] in ("--hosts", "--link")]:
        raise TaskError(f"{late[0]} stands after the script, whose own it would be; options of the plan come before it")
    given = [option.name for option in fields(Job) if getattr(args, option.name, None)]
    if more := sorted({*given} - _WITH_A_SCRIPT):
        raise TaskError(
            f"--{more[0].replace('_', '-')} is for built-in tasks; a script says itself how it trains, "
            "and its own arguments follow it"
        )


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
