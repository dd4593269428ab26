"""Dedicated servers over real processes: the numbers of virtual workers, deaths, checkpoints."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic import FrameError, LaunchError, ServerLostError, Session, attach, serve
from laconic.server.client import ServerClient, connect_to_servers
from laconic.server.listener import Listener
from laconic.server.serve import _accept, worker_terms
from laconic.session import Replicas
from laconic.transport import (
    InProcess,
    exchange_addresses,
    in_process,
)
from laconic_lab.records import RECORDS, read
from tests.ddp_training import start
from tests.parts import made
from tests.virtual import gradients, one_step
from tests.workers import WorkerPool, flat_parameters


def _client(text: str) -> ServerClient:
    """This rank's end under rank 0, which serves."""
    hello = worker_terms(made(text), undoes=False, holds_idle=False)
    return connect_to_servers(dist.get_rank() - 1, dist.get_world_size() - 1, [0], hello, 60)


def _as_worker(text: str) -> Session:
    return Session(made(text), _client(text))


def _steps_served(texts: list[str], steps: int) -> list[list[dict[str, Tensor]]]:
    outs: list[list[dict[str, Tensor]]] = []
    for text in (str(made(text)) for text in texts):
        if dist.get_rank() == 0:
            stats = serve(text, servers=[0])
            assert stats.steps == steps and not stats.lost
            outs.append([])
            continue
        session = _as_worker(text)
        outs.append([one_step(session, gradients(dist.get_rank() - 1, step)) for step in range(steps)])
        session.transport.close()
    return outs


def test_a_dedicated_server_gives_the_numbers_of_virtual_workers(fresh_workers: WorkerPool) -> None:
    texts = [
        "overlap:rho=0.05,warmup=1",
        "topk:rho=0.05,exchange=server(down_rho=0.1)",
        "sign:vote=weighted",
    ]
    served = fresh_workers.run(_steps_served, texts, 4)
    for number, text in enumerate(texts):

        def work(transport: InProcess, text: str = text) -> list[dict[str, Tensor]]:
            session = Session(made(text), transport)
            return [one_step(session, gradients(transport.rank, step)) for step in range(4)]

        want = in_process(3, work, num_servers=1)[0]
        for rank in (1, 2, 3):
            for step, got in enumerate(served[rank][number]):
                if "warmup" in text and step == 0:  # a dense step: floats, added in the same order here
                    continue
                assert all(torch.equal(got[name], want[step][name]) for name in got), (text, step)


def _until_one_dies(text: str) -> Any:
    text = str(made(text))
    if dist.get_rank() == 0:
        with redirect_stderr(StringIO()) as said:
            return serve(text, servers=[0]).as_dict(), said.getvalue()
    session, sums = _as_worker(text), []
    for step in range(6):
        if step == 3 and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        sums.append(
            one_step(
                session, {name: torch.full_like(g, float(dist.get_rank())) for name, g in gradients(0, step).items()}
            )
        )
    living = session.transport.num_living
    session.transport.close()
    return [float(out["f"][0]) for out in sums], living


def test_a_dedicated_server_goes_on_without_a_worker_that_was_killed() -> None:
    pool = WorkerPool(4)
    try:
        for pipe in pool.pipes:
            pipe.send((_until_one_dies, ("topk:rho=0.05,exchange=server",)))
        told = []
        for pipe in pool.pipes[:3]:
            assert pipe.poll(120), "it hangs after a worker died"
            ok, value = pipe.recv()
            assert ok, value
            told.append(value)
    finally:
        pool.close()
    (stats, said), first, second = told
    assert stats["lost"] == {2: "is gone after 3 steps"} and stats["steps"] == 6
    assert first == second == ([2.0, 2.0, 2.0, 1.5, 1.5, 1.5], 2)  # small parameters go whole: the mean over the living
    assert said.count("worker 2 is gone after 3 steps; going on with 2 of 3") == 1


def _out_of_step(text: str) -> str:
    text = str(made(text))
    try:
        if dist.get_rank() == 0:
            serve(text, servers=[0])
            return "served"
        client = _client(text)
        if dist.get_rank() == 2:
            client.total(torch.ones(1))
        one_step(Session(made(text), client), gradients(0, 0))
    except FrameError as error:
        return str(error)
    return "nobody noticed"


def _server_that_ends(text: str) -> str:
    if dist.get_rank() == 0:
        listener = Listener(dist.get_world_size() - 1, 60)
        exchange_addresses([0], listener.address)
        _accept(listener)
        listener.receive_round(lambda rank, message: None)
        listener.close()
        return "server 0 is gone"
    session = _as_worker(str(made(text)))
    try:
        one_step(session, gradients(0, 0))
    except ServerLostError as error:
        return str(error)
    return "nobody noticed"


def test_who_asks_something_else_is_named_and_a_dead_server_is_one_line(fresh_workers: WorkerPool) -> None:
    for said in fresh_workers.run(_out_of_step, "topk:rho=0.05,exchange=server"):
        assert "worker 1 sent total, but the others sent layout of step 0, bucket 0" in said
    for said in fresh_workers.run(_server_that_ends, "topk:rho=0.05,exchange=server"):
        assert "server 0 is gone" in said and "\n" not in said


def _another_release() -> str:
    before = laconic.__version__
    laconic.__version__ = "0.0.9" if dist.get_rank() == 0 else before
    try:
        if dist.get_rank() == 0:
            serve("overlap", servers=[0])
        else:
            _client("overlap")
    except LaunchError as error:
        return str(error)
    finally:
        laconic.__version__ = before
    return "nobody noticed"


def test_a_server_of_another_release_is_told_apart_before_anyone_waits(fresh_workers: WorkerPool) -> None:
    here = f"laconic {laconic.__version__}"
    server, *workers = fresh_workers.run(_another_release)
    assert server == f"rank 1 runs {here}, this rank laconic 0.0.9; run the same on all ranks"
    assert set(workers) == {f"rank 0 runs laconic 0.0.9, this rank {here}; run the same on all ranks"}


def _ten_steps_or_five_and_five(text: str) -> bool:
    """Whether weights and states are the same after ten steps and after five, a checkpoint, and five more."""
    if dist.get_rank() == 0:
        for _ in range(2):
            serve(text, servers=[0])
        return True
    workers = dist.new_group([1, 2, 3], use_local_synchronization=True)
    ends: list[tuple[Tensor, Tensor]] = []
    saved: dict[str, Any] = {}
    for first in (0, 5):
        run = start(None, process_group=workers)
        session = attach(run.ddp, text, servers=[0], pipeline=True)
        if first:
            run.ddp.module.load_state_dict(saved["model"])
            session.load_state_dict(saved["session"])
        for step in range(first, 10):
            if step == 5 and not first:
                saved = {"model": copy.deepcopy(run.ddp.module.state_dict()), "session": session.state_dict()}
            run.step(step)
        state = session.state_dict()
        if dist.get_rank() == 1:
            assert len(state["servers"]) == 1 and state["servers"][0].numel() > 4 * 1000
        ends.append((flat_parameters(run.ddp), state["memory"]["residual"]["body.weight"]))
        session.close()
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def _healed_by_others(text: str) -> list[bool]:
    """Whether a replica that drifted is as it was, on each worker of a server."""
    if dist.get_rank() == 0:
        serve(text, servers=[0])
        return []
    client = _client(text)
    parameters = {"a": torch.ones(3), "b": torch.arange(70.0)}
    replicas = Replicas(parameters, client, every=1, on_mismatch="heal")
    replicas.check_()
    parameters["b"][9] += client.rank == 1
    replicas.check_()
    before = dict(client.traffic.by_kind)
    client.close()
    return [torch.equal(parameters["b"], torch.arange(70.0)), not before]


def test_replicas_are_compared_and_mended_under_a_dedicated_server(fresh_workers: WorkerPool) -> None:
    _, *healed = fresh_workers.run(_healed_by_others, "topk:rho=0.05,exchange=server")
    assert healed == [[True, True]] * 3


def test_a_checkpoint_under_a_dedicated_server_holds_what_the_server_keeps(fresh_workers: WorkerPool) -> None:
    assert all(fresh_workers.run(_ten_steps_or_five_and_five, "overlap:rho=0.05,per=parameter,down_rho=0.1"))


@pytest.mark.slow
def test_training_outlives_a_killed_worker_and_resumes_after_a_killed_server(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "laconic", "train", "--workers", "3", "--servers", "1", "--steps", "40"]
    words += ["--eval-every", "10", "--batch", "8", "--scheme", "overlap:rho=0.01", "--json"]
    whole = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    code, said, result = _train_and_kill(words, tmp_path / "worker", rank=1)
    assert code == 0 and said.count("worker 0 is gone after ") == 1
    assert result["steps"] == 40 and list(result["lost_workers"]) == ["0"]
    code, said, _ = _train_and_kill(words, tmp_path / "server", rank=0)
    assert code == 2 and said.count("server 0 is gone") == 3 and "Traceback" not in said
    resumed = subprocess.run([*words, "--out", str(tmp_path / "server"), "--resume"], capture_output=True, check=True)
    assert json.loads(resumed.stdout)["loss"] == whole["loss"]


def _train_and_kill(words: list[str], out: Path, rank: int) -> tuple[int, str, dict[str, Any]]:
    """Kill one rank with signal 9 after step 13: (exit code, what was said, the result)."""
    run = subprocess.Popen([*words, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while run.poll() is None and not (
        (out / RECORDS).exists() and any(fact["step"] >= 13 for fact in read(out, "step"))
    ):
        time.sleep(0.05)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    mark = f"RANK={rank}".encode()
    (victim,) = [int(pid) for pid in children if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(victim, signal.SIGKILL)
    told, said = run.communicate(timeout=300)
    return run.returncode, said, json.loads(told) if told else {}
