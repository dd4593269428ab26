"""How long a member takes to join over a slow link, and whether the others notice: 85 M entries at 100mbit in the lab.

python tools/join_time.py [--entries 85000000] [--link 100mbit]

Needs root. Two members train on hosts of their own; a third joins. Printed are the seconds of its join, those that the
anchor alone takes on the wire, and the others' seconds a step before and while it joins.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from laconic_lab.network import Lab, LabSpec, Link

MEMBER = """
import json, sys, time, torch, laconic
torch.set_num_threads(1)
widths = [int(sys.argv[3]) // 16000] * 16
model = torch.nn.ModuleList([torch.nn.Linear(width, 1000, bias=False) for width in widths])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
begun = time.time()
member = laconic.join(sys.argv[1], model, optimizer, id=sys.argv[2], timeout_s=600)
print(json.dumps({"joined_s": time.time() - begun}), flush=True)
while True:
    begun = time.time()
    with torch.no_grad():
        model[0].weight[:8].add_(1e-4)  # a step that leaves the cores to the others
    time.sleep(0.2)
    member.step(tokens=32)
    print(json.dumps({"at": begun, "step_s": time.time() - begun}), flush=True)
"""


def main() -> None:
    """Print one line of JSON."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--entries", type=int, default=85_000_000)
    arguments.add_argument("--link", default="100mbit")
    given = arguments.parse_args()
    link = Link.parse(given.link)
    assert link.bits_per_s is not None
    with tempfile.TemporaryDirectory() as name, Lab.create(LabSpec(4, link, {0: Link()})) as lab:
        folder = Path(name)
        words = ["serve", "--listen", "0.0.0.0:7700", "--scheme", "streaming:every=100000,fragments=8,bits=4"]
        server = lab.hosts[0].popen([sys.executable, "-m", "laconic", *words], stderr=subprocess.PIPE)
        assert server.stderr is not None and "members dial" in server.stderr.readline()

        def start(index: int) -> Path:
            path = folder / f"{index}.jsonl"
            with path.open("w") as file:
                command = [sys.executable, "-c", MEMBER, "10.77.0.1:7700", f"m{index}", str(given.entries)]
                lab.hosts[index].popen(command, stdout=file)
            return path

        others = []
        for index in (1, 2):
            others.append(start(index))
            _await(others[-1], 20)
        begun = time.time()
        joined = _await(start(3), 1)[0]["joined_s"]
        steps = [line for path in others for line in _await(path, 1) if "at" in line]
        wire_s = 32 * given.entries / link.bits_per_s
        print(
            json.dumps(
                {
                    "entries": given.entries,
                    "link": given.link,
                    "join_s": round(joined, 1),
                    "wire_s": round(wire_s, 1),
                    "ratio": round(joined / wire_s, 3),
                    "step_ms_before": _median_ms(s["step_s"] for s in steps if s["at"] < begun),
                    "step_ms_meanwhile": _median_ms(s["step_s"] for s in steps if s["at"] >= begun),
                }
            )
        )


def _median_ms(seconds: Iterable[float]) -> float:
    return round(1e3 * statistics.median(list(seconds)), 2)


def _await(path: Path, count: int) -> list[dict[str, float]]:
    """The lines of a member, once there are so many."""
    while len(lines := path.read_text().splitlines()) < count:
        time.sleep(0.5)
    return [json.loads(line) for line in lines if line.endswith("}")]


if __name__ == "__main__":
    main()
