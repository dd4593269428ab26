"""The page about watching a run: its code, with the real programs that it names, over two processes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.workers import free_port, run_script

STEPS = 1000
PAGE = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
SCRIPT, *WRITERS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
WRITE = re.compile(
    r"(from torch.utils.tensorboard[^\n]*)|(events = .*?\n\n\ndef write.*?\n\n\n)|(events.close\(\))", re.S
)
EXPORTED = """
import os, pathlib, time
from laconic.integrations.prometheus import export
stop = export(session, {port} + dist.get_rank(), labels={{"job_name": "test"}})
"""
UNTIL_READ = """
dist.barrier()
while not pathlib.Path({done!r}).exists():
    time.sleep(0.05)
stop()
"""


def _run(code: str, folder: Path) -> str:
    """What two ranks print that run so many steps in a folder."""
    script = folder / "script.py"
    assert "range(20)" in code
    script.write_text(f"import os\nos.chdir({str(folder)!r})\n" + code.replace("range(20)", f"range({STEPS})"))
    codes, printed = run_script(script, 2)
    assert codes == [0, 0], printed
    assert printed.count(f"{STEPS} steps (0 skipped), 2 workers") == 2
    return printed


def _without_tensorboard(writer: str) -> str:
    """The script with another writer, which rank 0 alone has."""
    code = WRITE.sub("", SCRIPT)
    indented = "\n".join(f"    {line}" for line in writer.splitlines())
    return code.replace("session = laconic", f"if dist.get_rank() == 0:\n{indented}\nsession = laconic")


def test_tensorboard_reads_every_step(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code = SCRIPT.replace('SummaryWriter("runs")', "SummaryWriter(f\"runs{os.environ['RANK']}\")")
    _run(code, tmp_path)
    events = event_accumulator.EventAccumulator(str(tmp_path / "runs0"), size_guidance={"scalars": 0}).Reload()
    names = {name for name in events.Tags()["scalars"] if name.startswith("laconic/")}
    assert names >= {f"laconic/{name}" for name in ("bytes_out", "ratio", "waited_ms", "exchange_ms", "members")}
    sent = [scalar.value for scalar in events.Scalars("laconic/bytes_out")]
    assert len(sent) == STEPS and all(value > 0 for value in sent)
    assert events.Scalars("laconic/bytes_out_total")[-1].value == sum(sent)


def test_weights_and_biases_writes_every_step(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    _run(_without_tensorboard(WRITERS[0]) + "\nif dist.get_rank() == 0:\n    run.finish()\n", tmp_path)
    assert [*tmp_path.glob("wandb/offline-run-*/*.wandb")]


def test_mlflow_keeps_every_step(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    # The folder's files can be counted; a database needs the whole of mlflow.
    settings = {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/runs", "MLFLOW_ALLOW_FILE_STORE": "true"}
    place = f"import os\nos.environ |= {settings}\n"
    _run(place + _without_tensorboard(WRITERS[1]), tmp_path)
    (kept,) = tmp_path.glob("runs/0/*/metrics/bytes_out")
    assert len(kept.read_text().splitlines()) == STEPS


def _ask(port: int, query: str) -> dict[str, float]:
    """What Prometheus answers to a query, by rank."""
    address = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(address, timeout=5) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return {one["metric"]["rank"]: float(one["value"][1]) for one in found}


def _wait_until(is_so: Callable[[], bool], timeout_s: float = 200) -> None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            if is_so():
                return
        except OSError:
            pass  # it does not answer yet
        time.sleep(0.2)
    raise AssertionError("not so in time")


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here; apt-get install prometheus")
def test_a_real_prometheus_reads_a_thousand_steps(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    port, web, done = free_port(), free_port(), tmp_path / "done"
    targets = [f"127.0.0.1:{port + rank}" for rank in (0, 1)]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [{"job_name": "laconic", "static_configs": [{"targets": targets}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    code = WRITE.sub("", SCRIPT).replace("write(session.metrics(), step)", "pass")
    code = code.replace("for step in", EXPORTED.format(port=port) + "for step in") + UNTIL_READ.format(done=str(done))
    printed: list[str] = []
    training = Thread(target=lambda: printed.append(_run(code, tmp_path)))
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{web}"], stdout=log, stderr=log)
    try:
        training.start()
        _wait_until(lambda: _ask(web, "laconic_steps_total") == {"0": STEPS, "1": STEPS})
        sent = _ask(web, "laconic_bytes_out_total")
        last = _ask(web, "laconic_step_bytes_out")
        ratio = _ask(web, "laconic_step_ratio")
        assert set(sent) == {"0", "1"} and all(sent[rank] == STEPS * last[rank] > 0 for rank in sent)
        assert all(value > 1 for value in ratio.values())
        assert _ask(web, 'laconic_step_members{job_name="test"}') == {"0": 2, "1": 2}
    finally:
        done.touch()
        training.join()
        server.terminate()
        server.wait()
    assert printed
