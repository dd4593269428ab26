"""Members that are replaced or slow, beside steady ones, at equal tokens: what that costs in loss and in time.

python tools/churn.py --text FILE [--tokens 400000] [--runs steady replaced] [--seeds 0 1 2] [--joiners empty]

A character model trains on virtual members with a clock of their own: a step takes a member as long as its speed says,
messages take no time. Every line is one run: steady members, members of which 30 % are replaced every 100 rounds (half
of those leave, half die), one member that is four times slower, and the same where all wait for all. Who replaces
another begins with an empty optimizer, with one and a learning rate that rises over its first N steps (warm:N), or with
the moments of a member that is there (donor).
"""

from __future__ import annotations

import argparse
import copy
import heapq
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from laconic import parse
from laconic.members.messages import Join, Outgoing, Word
from laconic.members.replica import Replica
from laconic.members.syncer import Syncer, fingerprint_of, stated_layouts

CONTEXT, WIDTH, BATCH = 16, 128, 32
SCHEME = "streaming:every=16,fragments=4,delay=4,lr=0.7,momentum=0.6"
LR = 1e-3
RUNS = ("steady", "replaced", "slow", "slow-lockstep")


def main() -> None:
    """Print a line of JSON for each run."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--text", type=Path, required=True)
    arguments.add_argument("--members", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=400_000)
    arguments.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--joiners", nargs="+", default=["empty"], help="empty, warm:N, donor")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    text = torch.tensor(list(given.text.read_bytes()))
    for seed in given.seeds:
        for name in given.runs:
            for joiner in given.joiners if name == "replaced" else [""]:
                run = Run(text, given.members, seed, joiner=joiner, is_lockstep=name.endswith("lockstep"))
                if name.startswith("slow"):
                    run.speeds["m0"] = 0.25
                label = f"{name}, {joiner}" if joiner else name
                print(json.dumps({"run": label, "seed": seed, **run.train(given.tokens)}), flush=True)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(128, WIDTH // 4),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH // 4, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, 128),
    )


class Trainee:
    """A virtual member: its model, its optimizer, and whether it waits for a result."""

    def __init__(self, run: Run, id: str) -> None:
        self.run = run
        self.id = id
        self.model = _model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        if run.is_begun and run.joiner == "donor":
            donor = run.trainees[run.rng.choice(sorted(run.trainees))]
            self.optimizer.load_state_dict(copy.deepcopy(donor.optimizer.state_dict()))
        self.warmup = int(run.joiner.partition(":")[2] or 1) if run.is_begun else 1
        generation = run.rng.randrange(1 << 31)
        self.replica = Replica(self.model, run.syncer.scheme, generation, seed=generation)
        layouts = self.replica.layouts
        run.num_connections += 1
        self.connection = run.num_connections
        run.trainees[self.connection] = self
        join = Join(id, generation, fingerprint_of(layouts), 0.9, stated_layouts(layouts))
        run.deliver(run.syncer.on_word(self.connection, join, run.now))

    def step(self) -> None:
        """Train on one batch."""
        inputs, targets = self.run.batch()
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.param_groups[0]["lr"] = LR * min(1.0, (self.replica.num_steps + 1) / self.warmup)
        self.optimizer.step()
        self.send(self.replica.after_step(BATCH))

    def send(self, words: list[Word]) -> None:
        """Let the server have messages at once."""
        for word in words:
            self.run.deliver(self.run.syncer.on_word(self.connection, word, self.run.now))

    def go(self, *, leaves: bool) -> None:
        """Leave, or die."""
        if leaves:
            self.send(self.replica.leave())
        del self.run.trainees[self.connection]
        self.run.deliver(self.run.syncer.on_lost(self.connection, self.run.now))


class Run:
    """A server, its members and a clock; the text's last tenth is held out."""

    def __init__(self, text: Tensor, num_members: int, seed: int, *, joiner: str, is_lockstep: bool) -> None:
        self.joiner = joiner  # what a member begins with that replaces another; "": nobody is replaced
        self.is_begun = False
        self.rng = random.Random(seed)
        self.now = 0.0
        self.num_connections = 0
        self.trainees: dict[int, Trainee] = {}
        self.speeds: dict[str, float] = {}
        self.syncer = Syncer(parse(SCHEME), wait_budget_s=4.0, is_lockstep=is_lockstep)  # type: ignore[arg-type]
        cut = len(text) * 9 // 10
        self._train, self._held_out = text[:cut], text[cut:]
        self._generator = torch.Generator().manual_seed(seed)
        for number in range(num_members):
            Trainee(self, f"m{number}")
        self.is_begun = True

    def batch(self, *, held_out: bool = False, count: int = BATCH) -> tuple[Tensor, Tensor]:
        """Contexts and what follows each."""
        text = self._held_out if held_out else self._train
        generator = torch.Generator().manual_seed(0) if held_out else self._generator
        at = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
        rows = text[at + torch.arange(CONTEXT + 1)]
        return rows[:, :CONTEXT], rows[:, CONTEXT]

    def deliver(self, outgoing: Sequence[Outgoing]) -> None:
        """Let members have messages at once."""
        for connection, word in outgoing:
            if word is not None and connection in self.trainees:
                trainee = self.trainees[connection]
                trainee.send(trainee.replica.on_word(word))

    def train(self, tokens: int) -> dict[str, float]:
        """Train until all members together have had so many tokens; loss, time, and tokens a second of the best."""
        queue = [(self.rng.random(), connection) for connection in self.trainees]
        heapq.heapify(queue)
        trained = 0
        replaced_at = 100
        alone = sum(self.speeds.get(trainee.id, 1.0) for trainee in self.trainees.values())
        while trained < tokens:
            self.now, connection = heapq.heappop(queue)
            self.deliver(self.syncer.on_time(self.now))
            trainee = self.trainees.get(connection)
            if trainee is None:
                continue
            step_s = 1 / self.speeds.get(trainee.id, 1.0)
            if self.syncer.is_lockstep and trainee.replica.awaited():
                heapq.heappush(queue, (self.now + 0.05, connection))
                continue
            trainee.step()
            trained += BATCH
            heapq.heappush(queue, (self.now + step_s, connection))
            if self.joiner and self.syncer.rounds >= replaced_at:
                replaced_at += 100
                gone = self.rng.sample(sorted(self.trainees), max(1, round(0.3 * len(self.trainees))))
                for number, old in enumerate(gone):
                    self.trainees[old].go(leaves=number % 2 == 0)
                    fresh = Trainee(self, f"n{self.num_connections}")
                    heapq.heappush(queue, (self.now + self.rng.random(), fresh.connection))
        return {
            "loss": round(self._loss(), 4),
            "rounds": self.syncer.rounds,
            "seconds": round(self.now, 1),
            "goodput": round(trained / BATCH / self.now / alone, 3),
            "late": sum(member.num_late for member in self.syncer.members.values()),
        }

    @torch.no_grad()
    def _loss(self) -> float:
        """The anchor's loss on text that nobody trained on."""
        model = _model()
        replica = Replica(model, self.syncer.scheme, 0)
        for number, piece in replica.pieces.items():
            piece.begin_at_(self.syncer.fragments[number].anchor)
        inputs, targets = self.batch(held_out=True, count=8192)
        return float(nn.functional.cross_entropy(model(inputs), targets))


if __name__ == "__main__":
    main()
