"""The command line as a user meets it, in processes of its own."""

from __future__ import annotations

import ast
import html
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from laconic import __version__, cli, recipes
from laconic_lab.compare import compare, round_of
from laconic_lab.errors import LaunchError, TaskError
from laconic_lab.figures import MEASURES
from laconic_lab.records import Recorder
from laconic_lab.train import Job, launch, resume
from laconic_lab.train.checkpoint import save_checkpoint
from laconic_lab.train.launch import first_failure, local_store
from laconic_lab.train.result import beside_dense
from tests.workers import FewWorkers, exit_code, start_laconic, wait_until

KILLED_AFTER_ITS_FIRST_CHECKPOINT = """
import os, signal, sys
import torch.distributed as dist
from laconic.cli import main
from laconic_lab.train import worker
save = worker.save
def save_and_die(loop):
    save(loop)
    if loop.steps_done:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
worker.save = save_and_die
sys.exit(main(sys.argv[1:]))
"""
# Gloo's threads get what time the main thread leaves them, so they free the last tensors when that is at its end.
STARVED = """
import os
from contextlib import suppress
from pathlib import Path
def starve():
    cores, starved = sorted(os.sched_getaffinity(0)), 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(task.name), {cores[int(os.environ["RANK"]) % len(cores)]})
            if "gloo" in (task / "comm").read_text():
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
                starved += 1
    assert starved
"""
STARVED_WORKER = """
from laconic.cli import run
from laconic_lab.train import worker
summarize = worker.summarize
def starve_and_summarize(loop):
    starve()
    return summarize(loop)
worker.summarize = starve_and_summarize
run()
"""
STARVED_SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import laconic
dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
session = laconic.attach(ddp, "topk:rho=0.01")
for step in range(3):
    if step == 2:
        starve()
    ddp(torch.randn(8, 64)).square().mean().backward()
dist.destroy_process_group()
"""
SMALL = ["--workers", "2", "--steps", "6", "--batch", "4", "--eval-every", "3"]
ENDLESS = ["train", "--workers", "2", "--steps", "100000", "--batch", "2"]


def laconic(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`laconic WORDS` to its end, with workers of its own that have torch already."""
    with TemporaryDirectory() as folder:
        return Started(Path(folder), *words, **variables).end()


class Started:
    """`laconic WORDS` in the background, in a session of its own."""

    def __init__(self, folder: Path, *words: str, **variables: str) -> None:
        self._words = words
        self._out, self._err = folder / "stdout", folder / "stderr"
        self._err.touch()
        self._process = start_laconic(*words, out=self._out, err=self._err, **variables)
        self.pid: int = self._process.pid

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Go on when the condition holds; an AssertionError where the process ends before."""
        wait_until(lambda: condition() or not self._process.is_alive(), 300)
        assert condition(), self._err.read_text()

    def await_line(self, text: str) -> None:
        """Go on when stderr has a line with this text."""
        self.wait_until(lambda: text in self._err.read_text())

    def workers(self) -> list[int]:
        """The processes that it launched, by rank."""
        return sorted(map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()))

    def end(self) -> subprocess.CompletedProcess[str]:
        """Its exit code and output, once it has ended."""
        code = exit_code(self._process, 900)
        return subprocess.CompletedProcess(self._words, code or 0, self._out.read_text(), self._err.read_text())


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_train_prints_one_object_and_leaves_records(tmp_path: Path, few_images: Path) -> None:
    """Once as a user starts it, with interpreters of its own."""
    words = ["--scheme", "topk:rho=0.01", "--json", "--out", str(tmp_path / "a b")]
    command = [sys.executable, "-m", "laconic", "train", *SMALL, "--data", str(few_images), *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["scheme"] == "topk:rho=0.01" and result["steps"] == 6 and result["bytes_out"] > 0
    assert set(result["split_ms"]) == {"compute", "select", "encode", "exchange", "decode"}
    assert sum(result["split_ms"].values()) == pytest.approx(result["step_ms"])
    facts = _records(tmp_path / "a b")
    assert facts[0]["kind"] == "job" and facts[0]["mps"] is False
    assert [fact["step"] for fact in facts if fact["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [fact["step"] for fact in facts if fact["kind"] == "eval"] == [0, 3, 6]
    assert sum(fact["bytes_out"] for fact in facts if fact["kind"] == "step") == result["bytes_out"]


@pytest.mark.slow
def test_a_resumed_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    """Killed after its first checkpoint, then resumed."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = ["train", "--workers", "2", "--steps", "20", "--batch", "8", "--eval-every", "10", "--quiet"]
    assert laconic(*words, "--out", str(whole)).returncode == 0
    script = tmp_path / "killed.py"
    script.write_text(KILLED_AFTER_ITS_FIRST_CHECKPOINT)
    killed = torchrun(str(script), *words, "--out", str(broken))
    assert "SIGKILL" in killed.stderr
    assert [path.name for path in (broken / "checkpoint").iterdir()] == ["step-10"]
    again = laconic(*words, "--out", str(broken), "--resume")
    assert again.returncode == 0, again.stderr
    for rank in (0, 1):
        want, got = (torch.load(f / f"checkpoint/step-20/rank-{rank}.pt", weights_only=True) for f in (whole, broken))
        for name, tensor in want["session"]["memory"]["residual"].items():
            assert torch.equal(got["session"]["memory"]["residual"][name], tensor)
        if rank == 0:
            assert all(torch.equal(got["model"][name], tensor) for name, tensor in want["model"].items())


def test_an_older_torch_gets_the_store_that_it_can_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.6 the store by libuv takes no socket that listens already."""
    asked: list[bool] = []
    make: Any = torch.distributed.TCPStore

    def of_torch_2_6(*place: Any, use_libuv: bool = True, **how: Any) -> Any:
        asked.append(use_libuv)
        if use_libuv:
            raise NotImplementedError("does not support initialization with an listen fd")
        return make(*place, use_libuv=False, **how)

    monkeypatch.setenv("LACONIC_SECRET", "0" * 32)  # else it would stay
    monkeypatch.setattr("torch.distributed.TCPStore", of_torch_2_6)
    store = local_store()
    store.set("place", "here")
    assert store.get("place") == b"here" and asked == [True, False]


@pytest.mark.slow  # test_plan.py plans over processes, test_report.py draws the page
def test_plan_prints_one_object_and_leaves_a_page(tmp_path: Path) -> None:
    asked = ["--scheme", "bf16", "--scheme", "local:every=8", "--if-workers", "16"]
    ran = laconic("plan", "--workers", "2", "--batch", "4", *asked, "--json", "--out", str(tmp_path / "a b"))
    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stdout.splitlines()
    found = json.loads(line)
    assert {row["scheme"] for row in found["rows"]} == {"bf16", "local:every=8"}
    assert found["pick"] in found["line"] and found["limit"] and found["what_if"]["16 workers"]["workers"] == 16
    by_name = {row["scheme"]: row for row in found["rows"]}
    assert by_name["bf16"]["tried"] and by_name["bf16"]["bytes_out"] > by_name["local:every=8"]["bytes_out"] > 0
    assert all(row["seconds_to_target"] == row["step_ms"] * row["steps_factor"] for row in found["rows"])  # 1000 steps
    assert json.loads((tmp_path / "a b" / "plan.json").read_text()) == found
    assert found["line"] in html.unescape((tmp_path / "a b" / "report.html").read_text())


@pytest.mark.slow
def test_auto_trains_under_what_it_picks_and_so_does_a_resume(tmp_path: Path) -> None:
    words = ["train", *SMALL, "--scheme", "auto", "--json", "--out", str(tmp_path)]
    ran = laconic(*words)
    assert ran.returncode == 0, ran.stderr
    told = re.findall("^laconic: auto picks (.*?): ", ran.stderr, re.M)
    assert told == [json.loads(ran.stdout.splitlines()[-1])["scheme"]]
    again = laconic(*words, "--resume", "--steps", "8")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["scheme"] == told[0]
    assert "auto picks" not in again.stderr


def test_compare_prints_rows(few_images: Path) -> None:
    schemes = ["--scheme", "dense", "--scheme", "topk:rho=0.05", "--data", str(few_images)]
    ran = laconic("compare", *SMALL, *schemes, "--json", "--target", "0.01", "--in-process")
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)["rows"]
    assert [row["scheme"] for row in rows] == ["dense", "topk:rho=0.05"]
    keys = {"scheme", "accuracy", "seconds_to_target", "step_ms", "bytes_out", "bytes_in", "ratio", "speedup"}
    assert all(keys <= set(row) for row in rows)
    # 4 bytes of 1,199,882 entries around a ring of two; the same gradients at 5 %.
    assert rows[0]["bytes_out"] == 4 * 1_199_882 and rows[0]["ratio"] == 1
    assert rows[1]["ratio"] == pytest.approx(rows[0]["bytes_out"] / rows[1]["bytes_out"], rel=1e-3)


@pytest.mark.slow  # a race of torch's own, met once in many runs
def test_the_same_command_runs_under_torchrun_though_gloo_frees_too_late(tmp_path: Path) -> None:
    ran = torchrun(_starved(tmp_path, STARVED_WORKER), "train", *SMALL, "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1])["steps"] == 6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starves threads as Linux does it")
def test_what_gloo_frees_too_late_aborts_no_script(tmp_path: Path) -> None:
    ran = torchrun(_starved(tmp_path, STARVED_SCRIPT))
    assert ran.returncode == 0, ran.stderr


def _starved(folder: Path, script: str) -> str:
    (folder / "starved.py").write_text((STARVED if sys.platform == "linux" else "def starve(): pass\n") + script)
    return str(folder / "starved.py")


def test_schemes_lists_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schemes"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name}" in f"\n{printed}" for name in recipes.RECIPES)


def test_schemes_tells_the_bits_of_those_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schemes", "maxnorm:bits=4", "bf16", "--workers", "4"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "maxnorm:bits=4: 6.463 bits an entry among 4 workers",
        "bf16: 16 bits an entry among 4 workers",
    ]
    assert cli.main(["schemes", "maxnorm:levels=127,stages=1", "--workers", "512"]) != 0
    assert "use 63 levels or fewer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words,said",
    [
        (["train", "--scheme", "topk:rho=7"], "give a share in (0, 1]"),
        (["train", "--scheme", "tokp"], "unknown recipe 'tokp'; did you mean 'topk'?"),
        (["train", "--steps", "0"], "--steps is 0"),
        (["train", "--steps", "ten"], "invalid int value"),
        (["train", "--steps", "3", "--epochs", "1"], "give one"),
        (["train", "--task", "imagenet"], "give fashion-mnist or"),
        (["train", "--model", "resnet8"], "has no model 'resnet8'"),
        (["train", "--task", "chars"], "give --data a text file"),
        (["train", "--task", "cifar10", "--data", "/nowhere"], "has no cifar-10-batches-bin"),
        (["train", "--data", "/nowhere"], "give --data the folder"),
        (["train", "--task", "chars", "--optimizer", "adam"], "give sgd or adamw or muon"),
        (["train", "--task", "chars", "--optimizer", "adamw"], "0.5, is for sgd; give --lr with --optimizer adamw"),
        (["train", "--betas", "0.9,0.95"], "--betas is for adamw; leave it out"),
        (["train", "--optimizer", "adamw", "--lr", "1e-3", "--momentum", "0.9"], "--momentum is for sgd; leave it out"),
        (["train", "--optimizer", "adamw", "--lr", "1e-3", "--betas", "0.9"], "as in --betas 0.9,0.95"),
        (["train", "--scheme", "sign", "--clip-norm", "1"], "leave --clip-norm out"),
        (["train", "--scheme", "dgc", "--optimizer", "muon", "--lr", "1e-3"], "carries momentum, and so does muon"),
        (["train", "--scheme", "sign", "--optimizer", "adamw"], "give --optimizer sgd, or another scheme"),
        (["train", "--clip-norm", "0"], "give a number above 0, or inf for none"),
        (["train", "--weight-decay", "-1"], "--weight-decay is -1.0"),
        (["train", "--warmup", "301"], "no more than --steps, 300"),
        (["train", "--context", "64"], "leave --context out"),
        (["train", "--accumulate", "3"], "a batch of 32 cannot be cut into 3 equal micro-batches"),
        (["train", "--amp", "fp8"], "give bf16 or fp16"),
        (["train", "--amp", "fp16", "--scheme", "torch-powersgd"], "one overflow stays; give --amp bf16"),
        (["train", "--resume"], "needs --out"),
        (["train", "--resume", "--out", "/tmp/laconic-no-such-run"], "holds no checkpoint"),
        (["train", "--backend", "nccl"], "needs --device cuda"),
        (["train", "--seed", "-1"], "--seed is -1; give a whole number from 0"),
        (["train", "--epochs", "inf"], "--epochs is inf; give a finite number"),
        (["train", "--epochs", "nan"], "--epochs is nan; give a finite number"),
        (["train", "--out", "/dev/null"], "give --out a folder that can be written"),
        (["train", "--hosts", "2", "--workers", "2"], "leave --workers out"),
        (["train", "--servers", "1", "--scheme", "topk"], "topk asks no server; leave --servers out"),
        (["compare", "--out", "/dev"], "/dev is not empty; give --out a new folder"),
        (["compare", "--scheme", "dense", "--scheme", "dense"], "given twice"),
        (["compare", "--target", "88"], "between 0 and 1"),
        (["compare", "--target", "0.8", "--target-loss", "2"], "two targets; give one"),
        (["compare", "--target-loss", "0"], "give a number above 0"),
        (["compare", "--scheme", "dense", "--scheme", "sign", "--clip-norm", "1"], "leave --clip-norm out"),
        (["plan", "--scheme", "nothing"], "unknown recipe 'nothing'"),
        (["plan", "--scheme", "torch-powersgd"], "try it with `laconic compare`"),
        (["plan", "--scheme", "bf16 --accumulate 0"], "one like 'bf16 --accumulate 4'"),
        (["plan", "--if-workers", "1"], "--if-workers is 1; give 2 or more"),
        (["plan", "--if-link", "fast"], "'fast' is no link"),
        (["plan", "--out", "/dev/null"], "give --out a folder that can be written"),
        (["train", "--scheme", "auto", "--servers", "1"], "leave --servers and --in-process out"),
        (["bench", "select", "--n", "0"], "--n is 0"),
        (["dance"], "unknown command 'dance'; give one of"),
        (["trian"], "did you mean 'train'?"),
        (["lab", "stauts"], "did you mean 'status'?"),
        (["train", "--shceme=topk"], "unknown option '--shceme'; did you mean '--scheme'? (laconic train --help"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_argument_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    assert code == 2 and printed.out == ""
    assert said in printed.err and len(printed.err.splitlines()) == 1


def test_the_help_of_train_has_each_heading_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    headings = [line for line in capsys.readouterr().out.splitlines() if line.endswith(":") and line[0] != " "]
    assert len(headings) > 5 and len(headings) == len(set(headings))


def _main(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that is refused before anything starts."""
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == ""
    return line


def test_a_checkpoint_that_does_not_fit_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--steps", "9", "--out", str(tmp_path), "--resume", "--scheme", "topk"]

    def save(saved: Job) -> None:
        state = {"settings": resume.settings(saved), "session": {"scheme": "dense"}}
        save_checkpoint(tmp_path, 5, 0, state, FewWorkers(), {"scheme": "dense", "num_workers": 1, "model": {}})

    save(Job(task="chars", scheme="dense"))
    assert "was made with --task chars; give that" in _main(capsys, *words)
    save(Job(scheme="dense", optimizer="adamw", lr=1e-3))
    assert "was made with --optimizer adamw; give that" in _main(capsys, *words)
    save(Job(scheme="dense"))
    assert "was made with --scheme dense, which keeps other things than topk" in _main(capsys, *words)
    assert "5 steps are done already" in _main(capsys, *words, "--steps", "5")


@pytest.mark.parametrize("command", [["train"], ["compare"], ["plan"], ["bench", "step"], ["train", "--in-process"]])
def test_a_gpu_that_is_missing_is_said_once(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = "laconic: --device is cuda, but torch sees no CUDA device here; use --device cpu"
    assert _main(capsys, *command, "--device", "cuda") == said


def test_ports_that_are_all_taken_are_said_once() -> None:
    """All ranks learn of it; rank 0 says it, and the launcher that the run has ended."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = laconic("train", *SMALL, "--scheme", "gossip", LACONIC_PORTS=f"{port}-{port}", GLOO_SOCKET_IFNAME="lo")
    reason, verdict = ran.stderr.splitlines()
    assert f"rank 0: all ports of LACONIC_PORTS={port}-{port} are taken at 127.0.0.1; name more of them" in reason
    assert ran.returncode and "all were stopped" in verdict


@pytest.mark.parametrize(
    ("scheme", "cure"),
    [("gossip", "mode=matched"), ("gossip-every", "mode=matched"), ("silent", "leave --in-process out")],
)
def test_workers_that_do_not_meet_are_not_studied_in_one_process(scheme: str, cure: str) -> None:
    with pytest.raises(TaskError, match=cure):
        Job(scheme=scheme, in_process=True)


def test_a_run_that_goes_on_otherwise_is_remarked_on() -> None:
    begun = [{"settings": resume.settings(Job(scheme="topk:", lr=0.2))}]
    assert resume.remark(Job(scheme="topk"), begun) == ""  # 0.2 is the task's own
    said = resume.remark(Job(scheme="topk", lr=0.1, seed=3), begun)
    assert said == "this run began with --lr 0.2, --seed 0 and goes on with --lr 0.1, --seed 3"


def test_a_cache_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert "set XDG_CACHE_HOME" in _main(capsys, "train", "--task", "cifar10")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"laconic {__version__}\n"


def test_a_closed_stderr_leads_nowhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["train", "--steps", "0"]) == 2
    assert capsys.readouterr().out == ""


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "laconic", "schemes"]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("laconic: cannot write the result (No space") and len(ran.stderr.splitlines()) == 1


def test_a_run_that_diverges_says_so_and_keeps_to_json(tmp_path: Path, few_images: Path) -> None:
    words = ["--scheme", "dense", "--lr", "1e30", "--json", "--out", str(tmp_path), "--data", str(few_images)]
    ran = laconic("train", *SMALL, *words)
    assert ran.returncode == 3
    facts = _records(tmp_path)
    (result,) = [fact for fact in facts if fact["kind"] == "result"]
    assert {"kind": "result", **json.loads(ran.stdout, parse_constant=_refuse)} == result
    first = next(fact["step"] for fact in facts if fact["kind"] == "step" and fact["loss"] is None)
    assert result["diverged_at"] == first and result["steps"] == 3 and result["loss"] is None
    *_, last = ran.stderr.splitlines()
    said = f"laconic: dense diverged: from step {first} on its loss is no number; try a smaller --lr or --momentum"
    assert last == said, ran.stderr
    assert not (tmp_path / "checkpoint").exists()


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_a_diverged_run_does_not_spoil_a_comparison(tmp_path: Path) -> None:
    for scheme, accuracy, diverged_at in (("dense", 0.1, 2), ("bf16", 0.8, None), ("topk", 0.7, None)):
        with Recorder(round_of(tmp_path, scheme, 1)) as records:
            for step in (0, 4):
                records.write("eval", step=step, seconds=step * 0.5, accuracy=accuracy, loss=1 - accuracy)
            records.write("step", step=1, ms=1.0, exchange_ms=1.0)
            sent = {"bytes_out": 8, "bytes_in": 8, "link_bytes_out": None, "link_bytes_in": None, "ratio": 1.0}
            judged = {"accuracy": accuracy, "loss": None if diverged_at else 1 - accuracy}
            result: dict[str, Any] = {"split_ms": {}, "steps": 2 if diverged_at else 4, **judged, **sent}
            records.write("result", diverged_at=diverged_at, **result)
    found = compare(tmp_path, ["dense", "bf16", "topk"], 1, MEASURES["accuracy"])
    assert found.steps == 4 and found.target == pytest.approx(0.79)
    assert [row.diverged_at for row in found.rows] == [2, None, None]
    # The accuracy before any training, which meets the target here, is not timed.
    assert [row.seconds_to_target for row in found.rows] == [None, 2.0, None]
    by_loss = compare(tmp_path, ["dense", "bf16", "topk"], 1, MEASURES["loss"])
    assert by_loss.target == pytest.approx(0.204)  # bf16's and 2 %
    assert [row.seconds_to_target for row in by_loss.rows] == [None, 2.0, None]
    assert compare(tmp_path, ["dense"], 1, MEASURES["loss"]).target is None
    assert compare(tmp_path, ["topk"], 1, MEASURES["loss"], 0.3001).rows[0].seconds_to_target == 2.0


@pytest.mark.parametrize("ratio,said", [(None, ""), (1.0, ""), (63.51, "63.5x fewer"), (0.5, "2.0x more")])
def test_a_ratio_in_words(ratio: float | None, said: str) -> None:
    assert beside_dense(ratio) == said


def test_ctrl_c_while_workers_import_torch_is_one_line() -> None:
    command = [sys.executable, "-m", "laconic", "train", "--workers", "2", "--steps", "100000", "--batch", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert wait_until(lambda: _load_torch(process.pid, num_workers=2))
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 130
    assert [line for line in said.splitlines() if "accuracy" not in line] == ["laconic: interrupted"], said


def _load_torch(pid: int, num_workers: int) -> bool:
    """Whether all workers have begun to import torch; before that Python itself starts, and prints what it likes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    workers = [child for child in children if b"\0RANK=" in Path(f"/proc/{child}/environ").read_bytes()]
    return sum("libtorch" in Path(f"/proc/{worker}/maps").read_text() for worker in workers) == num_workers


def test_ctrl_c_is_one_line_and_leaves_no_process(tmp_path: Path, few_images: Path) -> None:
    started = Started(tmp_path, *ENDLESS, "--data", str(few_images), "--eval-every", "1")
    started.await_line("step 0")
    workers = started.workers()
    assert len(workers) == 2
    os.killpg(started.pid, signal.SIGINT)
    ran = started.end()
    assert ran.returncode == 130
    assert [line for line in ran.stderr.splitlines() if "accuracy" not in line] == ["laconic: interrupted"], ran.stderr
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_a_killed_worker_ends_the_run_with_one_line(tmp_path: Path, few_images: Path) -> None:
    started = Started(tmp_path, *ENDLESS, "--data", str(few_images))
    started.await_line("step 0")
    os.kill(started.workers()[1], signal.SIGKILL)
    ran = started.end()
    assert ran.returncode == 2
    lines = [line for line in ran.stderr.splitlines() if line and "step 0" not in line]
    lines = [line for line in lines if not line.startswith("laconic: rank")]  # what its peers noticed
    assert lines == ["laconic: worker 1 of 2 ended by SIGKILL; all were stopped"], ran.stderr


@pytest.mark.parametrize(
    "codes,first",
    [
        ([1, -signal.SIGKILL], "worker 1 of 2 ended by SIGKILL"),  # which rank 0 noticed, and failed for want of it
        ([None, 1], "worker 1 of 2 ended with exit code 1"),
    ],
)
def test_the_launcher_names_the_first_that_failed(codes: list[int | None], first: str) -> None:
    assert first_failure(codes, Job(workers=2)) == f"{first}; all were stopped"


def test_a_launcher_is_one_node_of_several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun's own variables name the nodes; ranks count on from those of the nodes before."""
    variables = {"PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29501"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    note = f"import os; open(r'{tmp_path}/' + os.environ['RANK'], 'w').write(repr(dict(os.environ)))"
    module = sys.modules["laconic_lab.train.launch"]  # whose name in its room is the function's
    monkeypatch.setattr(module, "worker_command", lambda job: [sys.executable, "-ISc", note])
    assert launch(Job(workers=2)) == 0
    ranks = {path.name: ast.literal_eval(path.read_text()) for path in tmp_path.iterdir()}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert {rank: [given[name] for name in names] for rank, given in ranks.items()} == {
        "2": ["2", "0", "6", "10.0.0.1", "29501"],
        "3": ["3", "1", "6", "10.0.0.1", "29501"],
    }


@pytest.mark.parametrize("variable,value", [("PET_NODE_RANK", None), ("PET_MASTER_PORT", None), ("PET_NNODES", "1:4")])
def test_half_of_the_variables_of_nodes_is_an_error(
    variable: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29501"}
    for name, given in {**whole, variable: value}.items():
        monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match=f"{value or variable}.*set PET_NNODES=N"):
        launch(Job(workers=1))


def test_workers_end_when_their_launcher_is_killed(tmp_path: Path, few_images: Path) -> None:
    started = Started(tmp_path, *ENDLESS, "--data", str(few_images))
    started.await_line("step 0")
    workers = started.workers()
    os.kill(started.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(Path(f"/proc/{worker}/exe").exists() for worker in workers))


def test_a_jobs_arguments_make_it_again() -> None:
    job = Job(task="cifar10", model="resnet8", data=Path("/a b"), steps=7, lr=0.25, labels_per_worker=2, json=True)
    import argparse

    from laconic_lab.cli.jobs import add_job_options, job_of

    parser = argparse.ArgumentParser()
    add_job_options(parser)
    assert job_of(parser.parse_args(job.arguments())) == job
