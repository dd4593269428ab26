"""Faults on real processes: `laconic train` on a tiny job, of which one rank is killed, stopped, slowed or starved."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from laconic.errors import LaunchError
from laconic.recipes import parse
from laconic_lab.chaos.mass import keeps_all, mass_lost
from laconic_lab.chaos.schedule import CHECKPOINT_EVERY, LINK_FAULTS, NUM_WORKERS, STEPS, TRUST_FAULTS, Case, Outcome
from laconic_lab.network import Lab
from laconic_lab.network.lab import stat_of
from laconic_lab.train.job import Job
from laconic_lab.train.launch import local_store, rank_variables, store_variables

TIMEOUT_S = 6.0  # that a worker waits for a silent one
_TIMEOUTS = 10  # after which a process that has neither ended nor gone on is late
_PAUSE_S = 1.0
_POLL_S = 0.02
_RESTART_AT = CHECKPOINT_EVERY + 1  # the step, from 0, before which a run ends that is then resumed
_CONTEXT: Any = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["laconic_lab.chaos.victim"])
_CONTINUES = ("pause", "slow", "trickle", "cut")  # after these a run goes on as if nothing had been


@dataclass
class _Ended:
    """The end of a job's ranks: exit codes, lines and digests."""

    codes: list[int | None]  # None: not within the deadline
    printed: list[str]
    digests: list[str]

    @property
    def is_done(self) -> bool:
        return not any(code != 0 for code in self.codes)


def check(case: Case, timeout_s: float = TIMEOUT_S, lab: Lab | None = None) -> Outcome:
    """Let a fault befall processes here, or one on each host of a lab; a worker waits `timeout_s` for others."""
    with tempfile.TemporaryDirectory(prefix="laconic-chaos-") as folder:
        home = Path(folder)
        broken = _check(case, home, timeout_s, lab)
        return Outcome(broken, (home / "struck").exists())


def _check(case: Case, home: Path, timeout_s: float, lab: Lab | None) -> list[str]:
    out = home / "out"
    num_ranks = len(lab.hosts) if lab else NUM_WORKERS
    job = _job(case.family, case.scheme, out, num_ranks, timeout_s)
    want = "" if _is_free(case) else _undisturbed(case.family, case.scheme, num_ranks, timeout_s)
    if case.phase == "resume":
        _run(job, home, replace(case, fault="restart", phase="training", rank=num_ranks - 1, number=_RESTART_AT), lab)
        (home / "struck").unlink()
        job = replace(job, resume=True)
    ended = _run(job, home, case, lab)
    broken = _unproven(ended, case.fault) if case.fault in TRUST_FAULTS else _common(ended, job)
    tallied = keeps_all(case.scheme)
    if tallied:
        broken += mass_lost(home, out)
    if case.fault in _CONTINUES:
        if not ended.is_done:
            broken.append(f"who is slow ends nobody: codes {ended.codes}, {_last_words(ended)}")
        elif len(set(ended.digests) - {""}) > 1:
            broken.append("replicas are equal")
        elif want and want not in ended.digests:
            broken.append("who is slow changes nothing")
        return broken + _left(out)
    servers = job.servers
    others = [code for rank, code in enumerate(ended.codes) if rank != case.rank and rank >= servers]
    # Before its second step DDP itself asks all ranks, to agree on its buckets, and ends with one that is gone.
    is_past_ddp = parse(case.scheme).of_what == "drift" or (case.number > 0 and case.phase != "resume")
    is_served = case.family == "dedicated server" and case.rank >= servers and is_past_ddp
    outlives = is_served or (_is_free(case) and case.phase != "resume")  # gossip resumes with all that began
    if outlives and case.fault in ("kill", "stop", "unplug") and any(others):
        broken.append(f"the others outlive one that is gone: codes {ended.codes}, {_last_words(ended)}")
    if any(code == 0 for code in ended.codes[servers:]):
        return broken + _left(out)
    resumes = any((out / "checkpoint").glob("step-*/manifest.json"))
    action = "resumed" if resumes else "started afresh"
    again = _run(_job(case.family, case.scheme, out, num_ranks, timeout_s, resume=resumes), home, None, lab)
    if not again.is_done:
        broken.append(f"a run can be {action}: codes {again.codes}, {_last_words(again)}")
    elif want and want not in again.digests:
        broken.append(f"a run that was {action} equals an undisturbed one")
    if tallied:
        broken += mass_lost(home, out)
    return broken + _left(out)


def _common(ended: _Ended, job: Job) -> list[str]:
    """Check what holds after any fault."""
    broken = []
    if None in ended.codes:
        late = [rank for rank, code in enumerate(ended.codes) if code is None]
        broken.append(
            f"every process ends or goes on within {_deadline_s(job):g} s: not rank {late}, {_last_words(ended)}"
        )
    for rank, (code, printed) in enumerate(zip(ended.codes, ended.printed, strict=True)):
        error_lines = [line for line in printed.splitlines() if line.startswith("laconic: ")]
        if code and code > 0 and (not error_lines or "Traceback" in printed):
            broken.append(f"an error is one line: rank {rank} printed {printed[-300:]!r}")
    return broken


def _unproven(ended: _Ended, fault: str) -> list[str]:
    """Check what holds where one rank cannot prove what the others know; what all raise alike is rank 0's to print."""
    cause = "LACONIC_SECRET" if fault == "wrong secret" else "LACONIC_TLS_CERT"
    printed = "".join(ended.printed)
    if all(ended.codes) and cause in ended.printed[0] and "Traceback" not in printed:
        return []
    return [f"a failed proof is an error of all that names it: codes {ended.codes}, {_last_words(ended)}"]


def _left(out: Path) -> list[str]:
    left = [path.name for path in out.rglob("*") if path.suffix in (".new", ".tmp", ".part")]
    return [f"no file is left: {left}"] if left else []


def _last_words(ended: _Ended) -> str:
    return " / ".join(text.splitlines()[-1][:200] if text.strip() else "nothing printed" for text in ended.printed)


def _deadline_s(job: Job) -> float:
    return _TIMEOUTS * job.server_timeout


def _is_free(case: Case) -> bool:
    return case.family == "gossip" and "matched" not in case.scheme


def _job(family: str, scheme: str, out: Path, num_ranks: int, timeout_s: float, *, resume: bool = False) -> Job:
    servers = int(family == "dedicated server")
    return Job(
        scheme=scheme,
        workers=num_ranks - servers,
        servers=servers,
        server_timeout=timeout_s,
        steps=STEPS,
        batch=4,
        eval_every=CHECKPOINT_EVERY,
        out=out,
        resume=resume,
        quiet=True,
    )


@cache
def _undisturbed(family: str, scheme: str, num_ranks: int, timeout_s: float) -> str:
    """The digest of the last model of a run that nothing befalls."""
    with tempfile.TemporaryDirectory(prefix="laconic-chaos-") as folder:
        ended = _run(_job(family, scheme, Path(folder) / "out", num_ranks, timeout_s), Path(folder), None, None)
    if not ended.is_done:
        raise LaunchError(f"{scheme} does not even run undisturbed; give a longer --timeout here: {_last_words(ended)}")
    return max(ended.digests)  # that of a server is empty


def _run(job: Job, home: Path, case: Case | None, lab: Lab | None) -> _Ended:
    """Run all ranks of a job, and see to it that a stopped one goes on in the end."""
    num_ranks = job.servers + job.workers
    common = {"OMP_NUM_THREADS": "1"}
    if lab is None:
        store = local_store()  # for as long as they run
        common |= store_variables(store)
    else:
        common |= {name: lab.hosts[0].variables[name] for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")}
    from laconic_lab.chaos.victim import be_rank

    processes = []
    for rank in range(num_ranks):
        for name in ("out", "err", "digest"):
            (home / f"{name}-{rank}").unlink(missing_ok=True)
        variables = {**common, **rank_variables(rank, num_ranks, rank)}
        variables |= _proofs(case, rank, home)
        namespace = lab.hosts[rank].namespace if lab else ""
        processes.append(_CONTEXT.Process(target=be_rank, args=(rank, variables, job, home, case, namespace)))
        processes[-1].start()
    try:
        codes = _wait(processes, _deadline_s(job), case, home / "struck", lab)
    finally:
        if lab is not None and case is not None:
            lab.heal(case.rank)
        for process in processes:
            if process.is_alive():
                process.kill()  # a stopped one too
            process.join()
    return _Ended(
        codes,
        [_read(home / f"err-{rank}") for rank in range(num_ranks)],
        [_read(home / f"digest-{rank}") for rank in range(num_ranks)],
    )


def _proofs(case: Case | None, rank: int, home: Path) -> dict[str, str]:
    """What a rank proves itself by, where another one is to fail at that."""
    if case is None or case.fault not in TRUST_FAULTS:
        return {}
    owner = "other" if rank == case.rank else "ours"
    if case.fault == "wrong secret":
        return {"LACONIC_SECRET": owner}
    files = home / f"{owner}.pem", home / f"{owner}.key"
    if not files[0].exists():
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        words += ["-subj", f"/CN={owner}", "-days", "2", "-out", str(files[0]), "-keyout", str(files[1])]
        subprocess.run(words, check=True, capture_output=True)
    return dict(zip(("LACONIC_TLS_CERT", "LACONIC_TLS_KEY"), map(str, files), strict=True))


def _wait(
    processes: Sequence[Any], deadline_s: float, case: Case | None, struck: Path, lab: Lab | None
) -> list[int | None]:
    """Their exit codes; one that was stopped or cut off goes on after a pause, or when all others have ended."""
    deadline = time.monotonic() + deadline_s
    victim = processes[case.rank] if case is not None else None
    resumes_at = 0.0
    is_cut = False
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if case is None or victim is None:
            continue
        if case.fault == "restart" and victim.exitcode == -signal.SIGKILL:
            for process in processes:
                process.kill()
        if case.fault in LINK_FAULTS and lab is not None and struck.exists():
            resumes_at = resumes_at or time.monotonic() + _PAUSE_S
            if not is_cut:
                lab.cut(case.rank)
                is_cut = True
            elif case.fault == "cut" and time.monotonic() > resumes_at:
                lab.heal(case.rank)
                resumes_at = deadline
        if case.fault in ("stop", "pause") and is_stopped(victim.pid):
            resumes_at = resumes_at or time.monotonic() + _PAUSE_S
            alone = not any(process.is_alive() for process in processes if process is not victim)
            if alone or (case.fault == "pause" and time.monotonic() > resumes_at):
                os.kill(victim.pid, signal.SIGCONT)
    return [process.exitcode for process in processes]


def is_stopped(pid: int) -> bool:
    """Return whether a process has been sent SIGSTOP."""
    try:
        return stat_of(pid)[0] == "T"
    except OSError:
        return False


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
