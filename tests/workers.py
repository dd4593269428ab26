"""Real worker processes over Gloo, kept for many tests: starting torch four times is most of a test's time.

They are forked from one process that has imported torch, and all that DDP imports when it is first built: 4.5 s of a
processor for each worker that would do so itself.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from laconic import cli
from laconic_lab.train.worker_group import WorkerGroup

# Who counts GPUs by the CUDA runtime has begun to use it, and its forks cannot.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
CONTEXT: Any = mp.get_context("forkserver" if sys.platform == "linux" else "spawn")
CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "laconic_lab.cli", "tests.workers"])
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ("cpu", pytest.param("cuda", marks=NO_GPU))  # where ranks train; several may share a GPU over Gloo


class WorkerPool:
    """`num_workers` processes in one Gloo group; `run` calls a module-level function in all of them."""

    def __init__(self, num_workers: int) -> None:
        port = free_port()
        self.num_workers = num_workers
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(num_workers):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, num_workers, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 300) -> list[Any]:
        """Results in rank order; a failure in any worker is an AssertionError with its traceback."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout_s):
                self.close()
                raise AssertionError(f"rank {rank} did not answer {function.__name__} in {timeout_s} s")
            ok, value = pipe.recv()
            results.append((ok, value))
        for rank, (ok, value) in enumerate(results):
            assert ok, f"rank {rank}:\n{value}"
        return [value for _, value in results]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


class FewWorkers(WorkerGroup):
    """A job's workers as one of them meets the others, who say what it says; some may die at each meeting."""

    def __init__(self, place: int = 0, num_living: int = 1, deaths: Sequence[int] = (0, 0)) -> None:
        self.place = place
        self.num_living = num_living
        self._deaths = list(deaths)

    def gather(self, own: Sequence[float]) -> list[list[float]]:
        self.num_living -= self._deaths.pop(0) if self._deaths else 0
        return [list(own)] * self.num_living

    def total(self, tensor: Tensor) -> Tensor:
        return tensor * self.num_living


def run_script(script: Path, num_ranks: int) -> tuple[list[int | None], str]:
    """(exit codes, all that was printed) of a script that runs once for each rank, as torchrun would run it."""
    port = free_port()
    out = script.with_suffix(".out")
    ranks = [start_forked(_run_script, script, rank, num_ranks, port, out=out, err=out) for rank in range(num_ranks)]
    return [exit_code(rank) for rank in ranks], out.read_text()


def start_forked(function: Callable[..., None], *arguments: Any, out: Path, err: Path) -> Any:
    """A process that has torch already and calls a function of a module; what it prints goes to these files."""
    process = CONTEXT.Process(target=_call, args=(function, arguments, out, err))
    process.start()
    return process


def start_laconic(*words: str, out: Path, err: Path, **variables: str) -> Any:
    """`laconic WORDS` in a session of its own, as a process that has torch already; so are the workers it launches."""
    return start_forked(_laconic, words, variables, out=out, err=err)


def _laconic(words: Sequence[str], variables: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.update(variables)
    torch.set_num_threads(1)  # what is forked has none of the others
    launching: Any = sys.modules["laconic_lab.train.launch"]
    launching.subprocess = SimpleNamespace(Popen=_ForkedWorker)
    sys.exit(cli.main(words))


class _ForkedWorker:
    """A launched worker: what subprocess.Popen would start as `python -c PROGRAM WORDS`, forked from its launcher."""

    returncode: int | None = None

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        _, option, program, *words = command
        assert option == "-c"
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(env)
            torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
            sys.argv = ["-c", *words]
            exec(program, {"__name__": "__main__"})  # which ends this process
            os._exit(1)

    def poll(self, how: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], timeout_s: float = 120) -> bool:
    """Wait for what another process or thread does; whether it did so in time."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def exit_code(process: Any, timeout_s: float = 300) -> int | None:
    """That of a process, once it has ended; one that takes too long is killed."""
    process.join(timeout_s)
    process.kill()
    process.join()
    code: int | None = process.exitcode
    return code


def _call(function: Callable[..., None], arguments: tuple[Any, ...], out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    function(*arguments)


def _run_script(script: Path, rank: int, num_ranks: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    _meet_at(port)
    runpy.run_path(str(script), run_name="__main__")


def _meet_at(port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(rank: int, num_workers: int, port: int, pipe: Connection) -> None:
    _meet_at(port)
    dist.init_process_group("gloo", rank=rank, world_size=num_workers)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def equal_everywhere(tensor: torch.Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return all(torch.equal(_bits(tensor), _bits(other)) for other in gathered)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def flat_parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).to(torch.float32) for p in model.parameters()])
