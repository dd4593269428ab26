"""Members and their server in one thread; messages wait until a schedule lets them through, in any order."""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import nn

from laconic import parse
from laconic.members.masks import Masks
from laconic.members.messages import Anchor, Bequest, Codes, Drift, Join, Word, read, write
from laconic.members.replica import Replica
from laconic.members.syncer import Syncer, fingerprint_of, stated_layouts


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@dataclass
class Snapshot:
    """A member's checkpoint, with its books at that time."""

    id: str
    generation: int
    model: dict[str, Any]
    state: dict[str, Any]
    deposited: dict[int, torch.Tensor]
    counted: dict[int, torch.Tensor]
    num_counted: dict[int, int]  # drifts, by fragment


class VirtualMember:
    """A member whose connection is two queues; a generation is a process."""

    def __init__(self, run: VirtualRun, id: str, generation: int, model: nn.Module | None = None) -> None:
        self.run = run
        self.id = id
        self.generation = generation
        self.model = model or small_model(seed=crc32(f"{id}/{generation}".encode()) % 1000)
        bits = run.syncer.mask_bits
        run.num_keys += bits > 0
        masks = run.masks(bits, random.Random(run.num_keys).randbytes(32)) if bits else None
        self.replica = Replica(self.model, run.syncer.scheme, generation, share=run.share, masks=masks)
        self.deposited: dict[int, torch.Tensor] = {
            n: torch.zeros(piece.part.num_entries, dtype=torch.float64) for n, piece in self.replica.pieces.items()
        }
        self.counted = {number: torch.zeros_like(vector) for number, vector in self.deposited.items()}
        self.last_counted: dict[int, int] = {}  # by fragment
        self.bequeathed = {number: torch.zeros_like(vector) for number, vector in self.deposited.items()}
        self.up: deque[Word] = deque()
        self.down: deque[Word] = deque()
        self.connection: int | None = None
        self.restored: Snapshot | None = None
        self.unsettled: set[int] = set()  # fragments of a restored one of which it does not know what became of them
        run.by_process[self.process] = self

    @property
    def process(self) -> str:
        return f"{self.id}/{self.generation}"

    def snapshot(self) -> Snapshot:
        """What its process would save."""
        num_counted = {number: len(self.run.counts(self.process, number)) for number in self.deposited}
        parts = (self.model.state_dict(), self.replica.state_dict(), self.deposited, self.counted)
        return Snapshot(self.id, self.generation, *copy.deepcopy(parts), num_counted)

    @classmethod
    def restore(cls, run: VirtualRun, snapshot: Snapshot) -> VirtualMember:
        """A new process that continues from a checkpoint."""
        member = cls(run, snapshot.id, snapshot.generation)
        member.model.load_state_dict(snapshot.model)
        member.replica.load_state_dict(snapshot.state)
        member.restored = snapshot
        member.deposited = copy.deepcopy(snapshot.deposited)
        member.unsettled = set(member.deposited)
        return member

    def _settle(self, number: int) -> None:
        """Take the books of a checkpoint over, once the server has told what became of its drifts."""
        assert self.restored is not None
        self.unsettled.discard(number)
        counts = self.run.counts(self.process, number)[self.restored.num_counted[number] :]
        sent = self.restored.state["pieces"][number]["sent"]
        if [drift for drift, _ in counts] not in ([], [sent and sent["is_encoded"] and sent["number"]]):
            piece = self.replica.pieces[number]
            assert torch.equal(piece.read(), piece.anchor), "a state that holds what was counted since is dropped"
            self.deposited[number].zero_()
            self.counted[number].zero_()
            return
        self.counted[number] = self.restored.counted[number].clone()
        for drift_number, values in counts:
            self.counted[number] += values
            self.last_counted[number] = drift_number

    def connect(self) -> None:
        self.run.num_connections += 1
        self.connection = self.run.num_connections
        self.up, self.down = deque(), deque()
        layouts = self.replica.layouts
        key = self.replica.masks.public if self.replica.masks else ""
        join = Join(self.id, self.generation, fingerprint_of(layouts), 0.9, stated_layouts(layouts), key)
        self.run.by_connection[self.connection] = self
        self.run.deliver(self.run.syncer.on_word(self.connection, join, self.run.now))

    def cut(self) -> None:
        """The connection breaks: what was on its way is gone."""
        if self.connection is not None:
            del self.run.by_connection[self.connection]
            number, self.connection = self.connection, None
            self.up, self.down = deque(), deque()
            self.run.deliver(self.run.syncer.on_lost(number, self.run.now))

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
        self.run.seen.append((self.process, word))
        if isinstance(word, Codes):
            piece = self.replica.pieces[word.fragment]
            if piece.sent is not None:
                values = piece.anchor - piece.sent.model + piece.sent.residual - piece.residual
                self.run.in_hand[self.process, word.fragment, piece.sent.number] = values.double()
        elif isinstance(word, Drift) and self.replica.masks is None:
            values = self.replica.pieces[word.fragment].codec.decode(word.payload, torch.device("cpu"))
            self.run.in_hand[self.process, word.fragment, word.number] = values.double()
        elif isinstance(word, Bequest):
            self.bequeathed[word.fragment] += word.payload.view(torch.float32).double()
        self.run.deliver(self.run.syncer.on_word(self.connection, word, self.run.now))

    def pass_down(self) -> None:
        """The oldest message of the server reaches this member."""
        if self.connection is not None and self.down:
            word = self.down.popleft()
            questions = {number: piece.question for number, piece in self.replica.pieces.items()}
            self.send(self.replica.on_word(word))
            if (
                isinstance(word, Anchor)
                and word.fragment in self.unsettled
                and word.question == questions[word.fragment]  # the answer to an earlier question changes nothing
            ):
                self._settle(word.fragment)


class VirtualRun:
    """A server and its members; every drift that was counted is noted."""

    def __init__(
        self, scheme: str, share: tuple[int, int] = (0, 1), masks: type[Masks] = Masks, **options: Any
    ) -> None:
        self.share = share  # of the fragments
        self.masks = masks
        self.num_keys = 0  # that were drawn
        self.seen: list[tuple[str, Word]] = []  # by the server, of each process
        self.now = 0.0
        self.num_connections = 0
        self.by_connection: dict[int, VirtualMember] = {}
        self.members: list[VirtualMember] = []
        self.saved: dict[int, dict[str, Any]] = {}
        self.options = options
        self.scheme = scheme
        self.anchors: dict[tuple[int, int], torch.Tensor] = {}  # fragment and version -> the server's
        self.in_hand: dict[tuple[str, int, int], torch.Tensor] = {}  # process, fragment, number -> a drift
        self.by_process: dict[str, VirtualMember] = {}
        self.left: set[str] = set()  # processes that handed over what they owed
        self._counts: dict[tuple[str, int], list[tuple[int, torch.Tensor]]] = {}
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

    def counts(self, process: str, number: int) -> list[tuple[int, torch.Tensor]]:
        """The drifts of a process that were counted, each with its number."""
        return self._counts.setdefault((process, number), [])

    def deliver(self, outgoing: list[Any]) -> None:
        """Put messages on their way, and note whose drifts were counted."""
        for number, fragment in self.syncer.fragments.items():
            for process, (_, drift_number) in fragment.counted.items():
                values = self.in_hand.pop((process, number, drift_number), None)
                if values is not None:
                    member = self.by_process[process]
                    self.counts(process, number).append((drift_number, values))
                    member.counted[number] += values
                    member.last_counted[number] = drift_number
        for connection, word in outgoing:
            if connection in self.by_connection and word is None:
                self.by_connection[connection].cut()
            elif connection in self.by_connection:
                self.by_connection[connection].down.append(read(write(word)))

    def check_books(self, member: VirtualMember) -> None:
        """Nothing of this member's training is lost: counted, or owed by its model and its residual, or left behind."""
        if not member.replica.is_ready:
            return
        for number, piece in member.replica.pieces.items():
            if number in member.unsettled:
                continue
            since, residual = piece.anchor, piece.residual
            if piece.sent and member.last_counted.get(number) == piece.sent.number:  # the update is on its way
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
