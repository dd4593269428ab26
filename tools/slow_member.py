"""One member of several that computes more slowly: the steps that all make, beside those that they make alone.

python tools/slow_member.py [--members 4] [--slowdown 4] [--seconds 60] [--step 0.2]

Needs root. Members are processes on hosts of a lab; a step is a stated sleep, longer on the slow host, and a batch of a
small model, so that they do not compete for the cores. Each counts its steps alone first, without a server, while all
others do so too. Every line is one run: a wait budget, or lockstep, where all wait for all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import laconic
from laconic.members import run_stats
from laconic_lab.network import Lab, LabSpec, Link

SCHEME = "streaming:every=16,fragments=4,delay=4"
ADDRESS = "10.77.0.1:7700"
BATCH = 32


def main() -> None:
    """Print a line of JSON for each run, or be a member."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--members", type=int, default=4)
    arguments.add_argument("--slowdown", type=float, default=4.0)
    arguments.add_argument("--seconds", type=float, default=60.0, help="of a run, and a third of them alone before")
    arguments.add_argument("--step", type=float, default=0.2, help="seconds of a step on a host that is not slow")
    arguments.add_argument("--link", type=Link.parse, default="100mbit")
    arguments.add_argument("--begins-at", type=float, help="be a member, which begins to count then")
    given = arguments.parse_args()
    if given.begins_at is not None:
        train(given)
        return
    for is_lockstep in (False, True):
        print(json.dumps(run(given, is_lockstep=is_lockstep)), flush=True)


def run(given: argparse.Namespace, *, is_lockstep: bool) -> dict[str, object]:
    """Let all members train in a lab for a while."""
    spec = LabSpec(given.members + 1, given.link, slow_of={1: given.slowdown})
    with Lab.create(spec) as lab:
        words = ["serve", "--listen", "0.0.0.0:7700", "--scheme", SCHEME, *["--lockstep"] * is_lockstep]
        server = lab.hosts[0].popen([sys.executable, "-m", "laconic", *words], stderr=subprocess.PIPE)
        assert server.stderr is not None and "members dial" in server.stderr.readline()
        begins_at = time.time() + 5 * given.members  # by when all have imported torch
        timing = [f"--begins-at={begins_at}", f"--seconds={given.seconds}", f"--step={given.step}"]
        command = [sys.executable, str(Path(__file__).resolve()), *timing]
        members = [host.popen(command, stdout=subprocess.PIPE) for host in lab.hosts[1:]]
        counts = [json.loads(member.communicate()[0]) for member in members]
    alone, together = (sum(count[name] for count in counts) for name in ("alone", "together"))
    return {
        "run": f"one of {given.members} is {given.slowdown:g} times slower" + ", lockstep" * is_lockstep,
        "steps a second alone": round(alone, 2),
        "steps a second": round(together, 2),
        "goodput": round(together / alone, 3),
        "of the slow one": round(counts[0]["together"] / counts[0]["alone"], 3),
        "tokens counted over trained": round(min(count["counted"] for count in counts), 3),
        "rounds": max(count["rounds"] for count in counts),
        "late": sum(count["late"] for count in counts),
    }


def train(given: argparse.Namespace) -> None:
    """Step alone, then as a member; print how many steps a second were made of either."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_s = given.step * float(os.environ["LACONIC_SLOWDOWN"])

    def steps_a_second(seconds: float, member: laconic.Member | None = None) -> float:
        begun = time.monotonic()
        count = 0
        while time.monotonic() < begun + seconds:
            inputs = torch.randn(BATCH, 64)
            loss = (model(inputs) - inputs.sum(1, keepdim=True).tanh()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(step_s)
            if member is not None:
                member.step(tokens=BATCH)
            count += 1
        return count / (time.monotonic() - begun)

    time.sleep(max(0.0, given.begins_at - time.time()))
    alone = steps_a_second(given.seconds / 3)
    member = laconic.join(ADDRESS, model, optimizer, id=f"m{os.environ['LACONIC_HOST']}")
    together = steps_a_second(given.seconds, member)
    stats = member.stats()
    members = run_stats(ADDRESS)["members"]
    own = next(each for each in members if each["id"] == member.id)
    facts = {"counted": own["tokens"] / (BATCH * stats.steps), "rounds": stats.run_rounds, "late": stats.late_rounds}
    print(json.dumps({"alone": alone, "together": together, **facts}))
    member.leave()


if __name__ == "__main__":
    main()
