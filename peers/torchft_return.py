"""A replica group that is killed and comes back, under torchft: laconic's drifts beside torchft's own DiLoCo.

    python peers/torchft_return.py --facts DIR --task chars --model gpt-tiny --data FILE --batch 4 --context 64 \\
        --schedule constant --warmup 20 --steps 160 | python -m results add peers-return --what ... --command ...

Each contender does the job undisturbed and with the last host's process killed after --kill-at steps and started again
at once, for every seed in a lab of its own, in turns; for each a JSON row of means. A run that DIR holds is not run
again. Every host is a replica group, and has a parent that starts it again as torchrun would; host 0 has the lighthouse
too. All train until the quorum has committed the rounds of --steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic_lab.train.measurement import interface_bytes
from same_job import Worker, parser, worker_of

EVERY = 16
NESTEROV = "lr=0.7,momentum=0.9"
CONTENDERS = {  # fragments, delay, and a scheme where laconic exchanges
    "laconic, 4 bits, 4 fragments, delay 3": (4, 3, f"streaming:every={EVERY},fragments=4,delay=3,{NESTEROV}"),
    "torchft DiLoCo, 4 fragments, delay 3": (4, 3, None),
    "torchft DiLoCo, whole model": (1, 0, None),
}
_LIGHTHOUSE_PORT = 29510
_TIMEOUT = timedelta(seconds=60)
_KILLED = "PEERS_KILLED"  # set where the process has been killed before


def main() -> None:
    """Compare; or be a host of the lab, the first time as the parent of the process that trains."""
    options = parser(__doc__)
    options.add_argument("--hosts", type=int, default=3)
    options.add_argument("--link", default="20mbit")
    options.add_argument("--kill-at", type=int, default=48, help="step after which the last host's process dies")
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--facts", type=Path, help="folder for the facts of all runs")
    options.add_argument("--contender", choices=CONTENDERS, help="inside the lab: who exchanges")
    options.add_argument("--child", action="store_true", help="inside the lab: train")
    asked = options.parse_args()
    if asked.contender is None:
        asked.facts.mkdir(parents=True, exist_ok=True)
        runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for seed in range(asked.seeds):
            for name in CONTENDERS:
                for kill_at in (0, asked.kill_at):
                    runs.setdefault((name, kill_at), []).append(_facts(name, kill_at, seed, asked))
        for (name, kill_at), facts in runs.items():
            print(json.dumps(_row(name, kill_at, facts)))
    elif asked.child:
        _train(asked)
    else:
        _supervise()


def _facts(name: str, kill_at: int, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """What one run came to."""
    kept: Path = asked.facts / f"{list(CONTENDERS).index(name)}-{kill_at}-{seed}.json"
    if not kept.exists():
        lab = [sys.executable, "-m", "laconic", "lab", "run", "--hosts", str(asked.hosts), "--link", asked.link, "--"]
        host = [sys.executable, __file__, *sys.argv[1:], "--seed", str(seed)]
        host += ["--contender", name, "--kill-at", str(kill_at)]
        ran = subprocess.run([*lab, *host], capture_output=True, text=True, timeout=600, check=False)
        printed = [json.loads(line.split("] ", 1)[1]) for line in ran.stdout.splitlines() if "] {" in line]
        if ran.returncode or not printed:
            sys.exit(f"{name}: {ran.stderr[-2000:]}")
        sent = sum(fact.get("link_bytes_out", 0) for fact in printed)
        kept.write_text(json.dumps({key: fact[key] for fact in printed for key in fact} | {"sent": sent}))
        print(f"seed {seed}, {name}, killed after {kill_at}: {kept.read_text()}", file=sys.stderr, flush=True)
    facts: dict[str, Any] = json.loads(kept.read_text())
    return facts


def _row(name: str, kill_at: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "exchange": name + (", a host dies" if kill_at else ""),
        "back in round": ", ".join(str(run["returned"]) for run in runs if kill_at) or None,
        "rounds": runs[0]["rounds"],
        "s": statistics.fmean(run["seconds"] for run in runs),
        "s by seed": ", ".join(f"{run['seconds']:.0f}" for run in runs),
        "final loss": statistics.fmean(run["loss"] for run in runs),
        "MB out, all hosts": statistics.fmean(run["sent"] / 1e6 for run in runs),
    }


def _supervise() -> None:
    """Start the process that trains, and once more where it was killed; print what its host has sent."""
    before = interface_bytes()
    if os.environ["LACONIC_HOST"] == "0":
        from torchft.coordination import LighthouseServer

        least = int(os.environ["LACONIC_HOSTS"]) - 1
        # As torchft's own command has it; its default here is 0.1 s, after which pairs go on without the third host.
        lighthouse = LighthouseServer(f"[::]:{_LIGHTHOUSE_PORT}", least, join_timeout_ms=60_000)  # noqa: F841
    command = [sys.executable, *sys.argv, "--child"]
    code = subprocess.call(command)
    if code == -signal.SIGKILL:
        code = subprocess.call(command, env=os.environ | {_KILLED: "1"})
    after = interface_bytes()
    assert before is not None and after is not None
    print(json.dumps({"link_bytes_out": after[0] - before[0]}), flush=True)
    sys.exit(code)


def _train(asked: argparse.Namespace) -> None:
    from torchft import Manager, ProcessGroupGloo

    logging.disable(logging.INFO)
    worker = worker_of(asked)
    host = f"host{worker.rank}"
    socket.gethostname = lambda: host  # by which torchft tells where a state that heals is fetched
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    pg = ProcessGroupGloo(timeout=_TIMEOUT)
    manager = Manager(
        pg=pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=worker.course.num_workers - 1,
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=2 * _TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://host0:{_LIGHTHOUSE_PORT}",
        replica_id=host,
        hostname=host,
    )
    fragments, delay, scheme = CONTENDERS[asked.contender]
    if scheme is None:
        exchange, average = _diloco(worker, manager, fragments, delay), _nothing
    else:
        from laconic.integrations.torchft import follow

        exchange, average = nullcontext(), follow(manager, pg, worker.model, worker.updater.optimizer, scheme).step
    with exchange:
        _run(worker, manager, average, EVERY // fragments, asked)


def _nothing() -> None:
    """torchft's DiLoCo is called by hooks of the optimizer."""


def _diloco(worker: Worker, manager: Any, num_fragments: int, delay: int) -> Any:
    """torchft's DiLoCo, and what its example lets a process that is healed take beside it."""
    from torchft.local_sgd import DiLoCo

    from torchft_diloco import fragments_of

    inner = worker.updater.optimizer
    manager.register_state_dict_fn("model", worker.model.load_state_dict, worker.model.state_dict)
    manager.register_state_dict_fn("inner", inner.load_state_dict, inner.state_dict)
    fragments = fragments_of(worker.model, num_fragments)
    outer = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
    return DiLoCo(manager, fragments, inner, outer, sync_every=EVERY, fragment_sync_delay=delay)


def _run(worker: Worker, manager: Any, average: Callable[[], object], apart: int, asked: argparse.Namespace) -> None:
    """Train until the quorum has committed all rounds; host 0 prints seconds and the loss of its model."""
    rounds = asked.steps // apart
    step = steps_here = 0
    seen = -1
    start = time.perf_counter()
    while manager.current_step() < rounds:
        worker.updater.set_rate_(worker.course.rate(step))
        worker.updater.optimizer.zero_grad()
        worker.course.backward_(worker.model, worker.updater, step, torch.device("cpu"))
        worker.updater.apply_()
        average()
        steps_here += 1
        step = max(step + 1, apart * manager.current_step())
        if _KILLED in os.environ and seen < 0 < manager.current_step():
            seen = manager.current_step()
            print(json.dumps({"returned": seen}), flush=True)
        if steps_here == asked.kill_at and worker.rank == worker.course.num_workers - 1 and _KILLED not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
    seconds = time.perf_counter() - start
    if worker.rank == 0:
        _, loss, count = worker.course.score(worker.model, torch.device("cpu"))
        print(json.dumps({"seconds": seconds, "loss": loss / count, "rounds": rounds}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
