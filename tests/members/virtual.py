"""Members and their server in one thread; messages wait until a schedule lets them through, in any order."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import torch
from torch import nn

from laconic import parse
from laconic.members.messages import Bequest, Drift, Join, Word, read, write
from laconic.members.replica import Replica
from laconic.members.syncer import Syncer, fingerprint_of, stated_layouts


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


class VirtualMember:
    """A member whose connection is two queues; a generation is a process."""

    def __init__(self, run: VirtualRun, id: str, generation: int) -> None:
        self.run = run
        self.id = id
        self.generation = generation
        self.model = small_model(seed=hash((id, generation)) % 1000)
        self.replica = Replica(self.model, run.syncer.scheme, generation)
        self.deposited: dict[int, torch.Tensor] = {
            n: torch.zeros(piece.part.num_entries, dtype=torch.float64) for n, piece in self.replica.pieces.items()
        }
        self.counted = {number: torch.zeros_like(vector) for number, vector in self.deposited.items()}
        self.counted_versions: dict[int, int] = {}
        self.bequeathed = {number: torch.zeros_like(vector) for number, vector in self.deposited.items()}
        self.up: deque[Word] = deque()
        self.down: deque[Word] = deque()
        self.connection: int | None = None

    def connect(self) -> None:
        self.run.num_connections += 1
        self.connection = self.run.num_connections
        self.up, self.down = deque(), deque()
        layouts = self.replica.layouts
        join = Join(self.id, self.generation, fingerprint_of(layouts), 0.9, stated_layouts(layouts))
        self.run.by_connection[self.connection] = self
        self.run.deliver(self.run.syncer.on_join(self.connection, join, self.run.now))

    def cut(self) -> None:
        """The connection breaks: what was on its way is gone."""
        if self.connection is not None:
            del self.run.by_connection[self.connection]
            number, self.connection = self.connection, None
            self.up, self.down = deque(), deque()
            self.run.deliver(self.run.syncer.on_lost(self.id, number, self.run.now))

    def train(self, rng: random.Random) -> None:
        """One step of something like training: the model moves at random, and that is noted."""
        if not self.replica.is_ready:
            return
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        vector = self.replica.vector
        for number, piece in self.replica.pieces.items():
            before = piece.read().double()
            vector.add_(torch.randn(piece.part.num_entries, generator=generator) * 0.1, piece.part)
            self.deposited[number] += before - piece.read().double()
        self.send(self.replica.after_step(rng.randrange(1, 50)))

    def send(self, words: list[Word]) -> None:
        if self.connection is not None:
            self.up.extend(words)

    def pass_up(self) -> None:
        """The oldest message of this member reaches the server."""
        if self.connection is None or not self.up:
            return
        word = read(write(self.up.popleft()))
        if isinstance(word, Drift):
            values = self.replica.pieces[word.fragment].codec.decode(word.payload, torch.device("cpu"))
            self.run.in_hand[f"{self.id}/{self.generation}", word.fragment, word.version] = self, values.double()
        elif isinstance(word, Bequest):
            self.bequeathed[word.fragment] += word.payload.view(torch.float32).double()
        self.run.deliver(self.run.syncer.on_word(self.id, self.connection, word, self.run.now))

    def pass_down(self) -> None:
        """The oldest message of the server reaches this member."""
        if self.connection is not None and self.down:
            self.send(self.replica.on_word(self.down.popleft()))


class VirtualRun:
    """A server and its members; every drift that was counted is noted."""

    def __init__(self, scheme: str, **options: Any) -> None:
        self.now = 0.0
        self.num_connections = 0
        self.by_connection: dict[int, VirtualMember] = {}
        self.members: list[VirtualMember] = []
        self.saved: dict[int, dict[str, Any]] = {}
        self.options = options
        self.scheme = scheme
        self.anchors: dict[tuple[int, int], torch.Tensor] = {}  # fragment and version -> the server's
        self.in_hand: dict[tuple[str, int, int], tuple[VirtualMember, torch.Tensor]] = {}
        self.syncer = self._server()

    def _server(self) -> Syncer:
        return Syncer(parse(self.scheme), save=self._save, **self.options)  # type: ignore[arg-type]

    def _save(self, number: int, state: dict[str, Any]) -> None:
        self.saved[number] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        self.anchors[number, int(state["version"])] = state["anchor"].clone()

    def restart_server(self) -> None:
        """The server dies, and another one begins from what was saved."""
        for member in list(self.by_connection.values()):
            self.by_connection.pop(member.connection or 0)
            member.connection = None
            member.up, member.down = deque(), deque()
        self.syncer = self._server()
        if self.saved:
            self.syncer.load({number: dict(state) for number, state in self.saved.items()})

    def deliver(self, outgoing: list[Any]) -> None:
        """Put messages on their way, and note whose drifts were counted."""
        for number, fragment in self.syncer.fragments.items():
            for process, version in fragment.counted.items():
                member, values = self.in_hand.pop((process, number, version), (None, None))
                if member is not None and values is not None:
                    member.counted[number] += values
                    member.counted_versions[number] = version
        for connection, word in outgoing:
            if connection in self.by_connection:
                self.by_connection[connection].down.append(read(write(word)))

    def check_books(self, member: VirtualMember) -> None:
        """Nothing of this member's training is lost: counted, or owed by its model and its residual, or left behind."""
        if not member.replica.is_ready:
            return
        for number, piece in member.replica.pieces.items():
            since, residual = piece.anchor, piece.residual
            if piece.sent and member.counted_versions.get(number) == piece.sent.version:  # the update is on its way
                since = piece.sent.model
            elif piece.sent:
                residual = piece.sent.residual
            owed = since.double() - piece.read().double() + residual.double()
            missing = member.deposited[number] - member.counted[number] - owed
            assert missing.abs().max() < 1e-4, f"{member.id}, fragment {number}: {missing.abs().max()}"

    def settle(self) -> None:
        """Let all messages through."""
        while any(member.up or member.down for member in self.members):
            for member in self.members:
                member.pass_up()
                member.pass_down()
