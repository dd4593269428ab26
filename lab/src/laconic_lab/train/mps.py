"""NVIDIA's MPS, which lets several processes use one GPU at the same time instead of in turns."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from laconic.errors import LaunchError
from laconic_lab.train.job import Job

VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_CONTROL = "nvidia-cuda-mps-control"
_QUIT = "quit -t 5"  # seconds for a worker that was killed to be noticed
_TIMEOUT_S = 60  # of a start that hangs
# The daemon starts its server for the first process that uses the GPU, and only then is it known whether that works.
CLIENT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
code = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
sys.exit(f"CUDA error {code}" if code else 0)
"""


def uses_mps(job: Job) -> bool:
    """Return whether this process, a worker of the job or its launcher, shares a GPU through MPS."""
    return job.device == "cuda" and VARIABLES[0] in os.environ


@contextmanager
def shared_gpu(job: Job, num_workers: int, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, workers that are started use MPS, where they are more than the GPUs; where it does not start, it is said.

    They find it by variables that name a folder, so it serves the hosts of a lab too.
    """
    with ExitStack() as running:
        if job.device == "cuda" and not uses_mps(job) and 0 < torch.cuda.device_count() < num_workers:
            try:
                running.enter_context(_serving())
            except LaunchError as error:
                say(f"laconic: the workers take turns on the GPU, since MPS does not start here: {error}")
        yield


@contextmanager
def _serving() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="laconic-mps-", ignore_cleanup_errors=True) as folder:
        ours = dict.fromkeys(VARIABLES, folder)
        # The daemon would count GPUs from the first that it sees, and workers, who have the variable too, once more.
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | ours
        _call([_CONTROL, "-d"], env)
        try:
            _call([sys.executable, "-I", "-S", "-c", CLIENT], {**os.environ, **ours})
            if not _call([_CONTROL], env, "get_server_list"):
                raise LaunchError("a process ran on the GPU without it")
            os.environ.update(ours)
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)
            with suppress(LaunchError):
                _call([_CONTROL], env, _QUIT)


def _call(words: list[str], env: Mapping[str, str], text: str = "") -> str:
    """Run a command to its end; what it says."""
    name = Path(words[0]).name
    # Into a file, since a daemon may hold on to a pipe; in a process group that Ctrl-C, which is the workers', misses.
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                words,
                input=text,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                process_group=0,
            )
        except OSError as error:
            raise LaunchError(f"{name}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{name} does not end") from None
        output.seek(0)
        lines = output.read().splitlines()
    if done.returncode:
        raise LaunchError(f"{name}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return "\n".join(lines)
