"""What each trainer's example sends in the lab: bytes on the interface beside those of stats(), as rows of a record.

    python tools/trainers_in_lab.py

Models are made wider, or headers of packets would be much of what is sent; FSDP2 shards over two processes of a host.
Counted is from the first forward pass to the last optimizer step: neither how the ranks meet nor what they save.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from laconic_lab.train.measurement import interface_bytes

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINERS = ("ddp", "fsdp", "accelerate", "lightning", "fabric", "transformers")
CHANGES = {
    "256": "16384",
    "n_embd=64": "n_embd=512",
    "save_steps=5": "save_steps=10",  # after the last step alone
    "(2, dist.get_world_size() // 2)": "(dist.get_world_size() // 2, 2)",
}


def main() -> None:
    """Run the trainers one after the other; or, on a host of the lab, one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", nargs="+", choices=TRAINERS, default=TRAINERS)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    if "LACONIC_HOST" in os.environ:
        _on_a_host(args.trainer[0])
        return
    most = 0.0
    for name in args.trainer:
        for hosts in args.hosts:
            row = _in_lab(name, hosts)
            most = max(most, _off(row["interface/stats"]))
            print(json.dumps(row), flush=True)
    print(json.dumps({"trainer": "all", "off at most": round(most, 4)}))


def _in_lab(name: str, hosts: int) -> dict[str, Any]:
    """The row of the host whose interface is furthest from what its processes counted."""
    tools = Path(sys.executable).parent
    command = [str(tools / "laconic"), "lab", "run", "--hosts", str(hosts), "--", str(tools / "torchrun")]
    command += ["--nproc-per-node", "2" if name == "fsdp" else "1", __file__, "--trainer", name]
    here = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
    said = re.findall(r'^\[(\d+)\] (\{"steps": .*\})$', ran.stdout, re.M)
    if ran.returncode or not said:
        sys.exit(f"{name} on {hosts} hosts did not end well:\n{ran.stderr}")
    of_hosts: dict[str, list[dict[str, Any]]] = {}
    for host, fact in said:
        of_hosts.setdefault(host, []).append(json.loads(fact))
    totals = [
        (sum(fact["stats"] for fact in facts), max(fact["interface"] for fact in facts)) for facts in of_hosts.values()
    ]
    stats, interface = max(totals, key=lambda total: _off(total[1] / total[0]))
    about = {"trainer": name, "hosts": len(of_hosts), "processes": len(said), "steps": json.loads(said[0][1])["steps"]}
    return {**about, "stats": stats, "interface": interface, "interface/stats": round(interface / stats, 4)}


def _off(ratio: float) -> float:
    return abs(ratio - 1)


def _on_a_host(name: str) -> None:
    """Run an example, and print what this process counted and what its host's interface saw meanwhile."""
    script = (EXAMPLES / f"with_{name}.py").read_text()
    for small, large in CHANGES.items():
        script = script.replace(small, large)
    marks: list[int] = []

    def begin(*_: object) -> None:
        if not marks:
            dist.barrier()
            marks.append(_sent())

    register_module_forward_pre_hook(begin)
    register_optimizer_step_post_hook(lambda *_: marks.append(_sent()))
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        copy = Path(folder) / f"with_{name}.py"
        copy.write_text(script)
        made = runpy.run_path(str(copy), run_name="__main__")
    holder: Any = made.get("trainer")
    session = made.get("session") or getattr(holder, "session", None) or holder.strategy.session
    stats = session.stats()
    fact = {"steps": stats.steps, "stats": stats.bytes_out, "interface": marks[-1] - marks[0]}
    print(json.dumps(fact), flush=True)


def _sent() -> int:
    """Bytes that left this host so far."""
    counted = interface_bytes()
    assert counted is not None  # a host of the lab has an interface of its own
    return counted[0]


if __name__ == "__main__":
    main()
