"""Schemes side by side on virtual workers, over several seeds: a row for each scheme and case, one JSON object a line.

    python tools/seeds.py --seeds 2,3,4 --workers 8 --scheme gossip-every:mode=matched --scheme gossip:mode=matched
    python tools/seeds.py --case "two labels: --labels-per-worker 2" --case "4 flipped: --flipped 4" --servers 1 ...

All other options are those of `laconic train`. Accuracies are in per cent, bytes those of a worker (and of all servers)
at a step, `share` the bytes out of a worker over those of the first scheme in the same case.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import mean
from typing import Any

import torch

from laconic_lab.cli.jobs import add_job_options, given_options
from laconic_lab.train import Job, work_in_process
from laconic_lab.train.result import Result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all schemes in all cases under all seeds, several at a time, and print the rows as they are complete."""
    parser = argparse.ArgumentParser(prog="python tools/seeds.py", description="Schemes over several seeds.")
    parser.add_argument("--scheme", action="append", required=True, dest="schemes", help="may be repeated")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--case", action="append", dest="cases", help="a name, a colon, options of `laconic train`")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    without = ("scheme", "seed", "in_process", "out", "json", "quiet")
    add_job_options(parser, without=without)
    args = parser.parse_args(arguments)
    of_case = argparse.ArgumentParser(prog="--case")
    add_job_options(of_case, without=without)
    cases = {}
    for case in args.cases or ["all labels:"]:
        name, _, words = case.partition(":")
        cases[name] = {**given_options(args), **given_options(of_case.parse_args(shlex.split(words)))}
    seeds = [int(word) for word in args.seeds.split(",")]
    jobs = [
        Job(**{**given, "scheme": scheme, "seed": seed, "in_process": True, "eval_every": 1_000_000, "quiet": True})
        for given in cases.values()
        for scheme in args.schemes
        for seed in seeds
    ]
    with ProcessPoolExecutor(args.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = map(result_of, jobs) if args.processes == 1 else pool.map(result_of, jobs)
        for name in cases:
            first: float | None = None
            for scheme in args.schemes:
                row = row_of(name, scheme, [next(results) for _ in seeds])
                first = first or row["bytes out"]
                print(json.dumps({**row, "share": round(row["bytes out"] / first, 4)}), flush=True)
    return 0


def result_of(job: Job) -> Result:
    """The result of a run in this process, on one core: several of them share the machine."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    results: list[Result] = []
    work_in_process(job, results.append, lambda text: None)
    return results[0]


def row_of(case: str, scheme: str, results: Sequence[Result]) -> dict[str, Any]:
    """The means over the seeds, and the accuracy of each."""
    accuracies = [round(100 * result.accuracy, 2) for result in results]
    servers = [out for result in results if (out := result.figures.get("server_bytes_out")) is not None]
    return {
        "scheme": scheme,
        "case": case,
        "accuracy": round(mean(accuracies), 3),
        "accuracy by seed": accuracies,
        "loss": round(mean(result.loss for result in results), 4),
        "bytes out": round(mean(result.bytes_out / result.steps for result in results)),
        "bytes in": round(mean(result.bytes_in / result.steps for result in results)),
        **({"server bytes out": round(mean(out / results[0].steps for out in servers))} if servers else {}),
    }


if __name__ == "__main__":
    sys.exit(main())
