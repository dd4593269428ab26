"""Mutants of valid inputs through every reader: each is to be refused as its reader promises, or read as a valid one.

    python tests/fuzz.py                            # all readers, ten seconds each
    python tests/fuzz.py --seconds 600 --seed 7     # `make fuzz`: longer, with other mutants
    python tests/fuzz.py --mutants 1000000 --seconds 3600 --as-built    # a million for each, over the usual library
    python tests/fuzz.py --only "frames of bf16"
    python -m tests.fuzz --collect                  # add to tests/corpus.json what reaches a refusal that nothing did

Inputs are flipped, cut, spliced, and given lengths and counts at the edges; most frames are sealed again, so that they
go past their check sum. The native readers run in native_fuzz.cpp, and beneath the Python readers here too, in a
library built with the address and undefined sanitizers, wherever the compiler has them: a look beside a tensor ends the
run with a report. A reader that hangs or takes memory without bound ends it too. What ends it names the seed and the
mutant; one JSON object a reader goes to stdout.
"""

from __future__ import annotations

import argparse
import base64
import faulthandler
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from laconic import FrameError, SchemeError, kernels, parse
from laconic.kernels.cpu import library
from laconic.layout import Layout
from laconic.members.codec import codec_for
from laconic.members.messages import Codes, Drift, Join, Keys, Refusal, Roster, Update, Word
from laconic.members.messages import read as read_word
from laconic.members.messages import write as write_word
from laconic.quantize import BF16, QUANTIZERS, ModuloCode, Trits
from laconic.replicas.messages import EntryMessages, GroupMessages, MessageWriter, ModuloMessages
from laconic.replicas.vector import ModelVector
from laconic.scheme import Scheme
from laconic.server.client import with_layout, without_layout
from laconic.server.owner import Owner
from laconic.transport import Kind, Message, pack, unpack
from laconic.transport.connection import rooms_of_message, views_of
from laconic.wire import INDEX_CODECS, FrameShape, IndexCodec, Runs
from laconic_lab.errors import TaskError
from laconic_lab.train.checkpoint import find_checkpoint, save_checkpoint
from tests.gossiping import Small
from tests.parts import ALL_TEXTS, gossip_texts, outer_texts
from tests.workers import FewWorkers

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
CORPUS = Path(__file__).with_name("corpus.json")
NATIVE = ROOT / "src/laconic/kernels/native"
READ_BY_NATIVE = ("bits", "lloyd", "rice", "modulo", "rounding", "signs")  # files with readers of what was sent
SANITIZED = "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"
BUILT_ALIKE = "-std=c++17", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-pthread"
MOST_BYTES = 1 << 30  # that a reader of a few hundred may take beyond what was there
MOST_SECONDS = 60  # that a reader may take beyond those it was given
_FUZZED = "LACONIC_FUZZED_LIBRARY"  # in the environment: the native library that runs beneath
A_DRAW = 256  # mutants of one generator: seeding it takes as long as ten
EDGES = (0, 1, 2, 3, 31, 32, 33, 255, 256, 2**16, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1)


@dataclass(frozen=True)
class Reader:
    """Something that reads what others wrote; it raises one of `refusals`, or returns what is as it promises."""

    name: str
    valid: list[bytes]
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = (FrameError,)
    frame_at: int | None = None  # where a frame begins that may be sealed again

    @property
    def stored(self) -> list[bytes]:
        """The inputs of the corpus."""
        return [base64.b64decode(text) for text in corpus().get(self.name, [])]

    @property
    def seeds(self) -> list[bytes]:
        """The inputs that are mutated."""
        return [*self.valid, *self.stored]

    def mutant(self, draw: Random, seeds: Sequence[bytes]) -> bytes:
        """One of the seeds with a few changes."""
        data = bytearray(_any(seeds, draw))
        for _ in range(_any((1, 1, 1, 2, 5), draw)):
            mutate_(data, _any(seeds, draw), draw)
        if self.frame_at is not None and draw.random() < 0.8:
            seal_again_(data, self.frame_at)
        return bytes(data)

    def run(self, seed: int, num_mutants: int, seconds: float) -> dict[str, Any]:
        """Read what is stored, and then so many mutants, or as many as there is time for."""
        refused = done = 0
        since = time.monotonic()
        for data in self.stored:
            with suppress(*self.refusals):
                self.read(data)
        seeds = self.seeds
        for number in range(num_mutants):
            if number % A_DRAW == 0:
                draw = Random(f"{seed} {number}")
                if time.monotonic() - since > seconds:
                    break
            mutant = self.mutant(draw, seeds)
            try:
                self.read(mutant)
            except self.refusals:
                refused += 1
            except BaseException:
                print(f"{self.name}: seed {seed}, mutant {number}: {mutant.hex()}", file=sys.stderr)
                raise
            done += 1
        taken = round(time.monotonic() - since, 1)
        return {"reader": self.name, "mutants": done, "taken for valid": done - refused, "seconds": taken}


@cache
def corpus() -> dict[str, list[str]]:
    """Base64 of the stored inputs, by reader."""
    stored: dict[str, list[str]] = json.loads(CORPUS.read_text())
    return stored


def collect(num_mutants: int = 2000) -> None:
    """Store, for each line that refuses, the shortest of so many mutants that gets there, and one for each reader."""
    stored = {name: list(texts) for name, texts in corpus().items()}
    reached: set[object] = set()
    for reader in readers():
        texts = stored.setdefault(reader.name, [])
        reached |= {_refusal(reader, data) for data in reader.seeds}
        shortest: dict[object, bytes] = {}
        seeds, draw = reader.seeds, Random(reader.name)
        for _ in range(num_mutants):
            mutant = reader.mutant(draw, seeds)
            at = _refusal(reader, mutant)
            if at is not None and len(mutant) < len(shortest.get(at, mutant + b"+")):
                shortest[at] = mutant
        new = [data for at, data in shortest.items() if at not in reached] or [*shortest.values()][: not texts]
        texts += (base64.b64encode(data).decode() for data in new)
        reached |= set(shortest)
    CORPUS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


def _refusal(reader: Reader, data: bytes) -> object:
    """The lines where an input is refused, the cause's among them; None where it is not."""
    try:
        reader.read(data)
    except reader.refusals as error:
        chain = (error, error.__context__)
        return tuple(traceback.extract_tb(each.__traceback__)[-1][:2] for each in chain if each is not None)
    return None


def _under(n: int, draw: Random) -> int:
    return int(draw.random() * n)  # a third of the time of randrange, and fair enough


def _any(choices: Sequence[T], draw: Random) -> T:
    return choices[_under(len(choices), draw)]


def mutate_(data: bytearray, other: bytes, draw: Random) -> None:
    """Change something: bits, a word, a piece, the length."""
    size = len(data)
    at = _under(size + 1, draw)
    word = at // 4 * 4
    match _under(7, draw):
        case 0 | 1 if size:
            for _ in range(_any((1, 1, 2, 8), draw)):
                data[_under(size, draw)] ^= 1 << _under(8, draw)
        case 2 if size:
            data[word : word + 4] = (_any(EDGES, draw) + _any((0, 0, 1, -1), draw)).to_bytes(9, "little", signed=True)[
                :4
            ]
            del data[size:]
        case 3:  # a word of the header, where a frame has its counts
            data[word % 40 : word % 40 + 4] = _under(80, draw).to_bytes(4, "little")
        case 4:
            del data[at if draw.random() < 0.5 else word :]
        case 5:
            data[word:word] = other[word : word + 4 * _under(5, draw)]
        case _:
            data[at:] = other[at:]


def seal_again_(data: bytearray, at: int) -> None:
    """Give the frame that begins there the check sum that fits it."""
    if len(data) - at >= 12 and (len(data) - at) % 4 == 0:
        words = torch.frombuffer(data, dtype=torch.int32, offset=at + 8)
        data[at : at + 8] = int(kernels.check_sum(words)).to_bytes(8, "little", signed=True)


def readers() -> list[Reader]:
    """All of them."""
    return [
        *(_frames(name, quantize()) for name, quantize in QUANTIZERS.items()),
        _frames("votes", Trits()),
        *(_codes(codec) for codec in INDEX_CODECS),
        _runs(),
        *_gossip(),
        _parts(),
        _layouts(),
        _heads(),
        _states(),
        _members(),
        _grid_drifts(),
        _schemes(),
        _checkpoints(),
    ]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes) -> Tensor:
    """In memory of its own, of this length to the byte."""
    there = torch.empty(len(data), dtype=torch.uint8)
    there.numpy()[:] = np.frombuffer(data, np.uint8)
    return there


def _positions(n: int, k: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(k))[:k].sort().values.to(torch.int32)


def _check_positions(positions: Tensor, n: int, k: int) -> None:
    assert positions.numel() == k and bool((positions[1:] > positions[:-1]).all())
    assert k == 0 or 0 <= int(positions[0]) <= int(positions[-1]) < n


def _frames(name: str, quantize: Any) -> Reader:
    valid = []
    n = 70
    for k, fixed in ((0, 9), (3, 0), (20, 5), (40, 30), (70, 0)):
        codes, scale = quantize.encode(torch.arange(k + fixed) % 3 - 1.0)
        shape = FrameShape(n, k, fixed, quantize)
        for write in (shape.write, shape.write_smallest):
            valid.append(_bytes_of(write(_positions(n, k), codes, scale, step=7, bucket=2)))

    def read(data: bytes) -> None:
        frame = _tensor(data)
        shape = FrameShape.of(frame, n, [quantize], peer=1)
        contents = shape.read(frame, step=7, bucket=2, peer=1)
        if not contents.overflow:
            _check_positions(contents.positions, n, shape.k)
            assert contents.values.numel() in (0, shape.num_fixed + shape.k) and bool(contents.values.isfinite().all())

    return Reader(f"frames of {name}", valid, read, frame_at=0)


def _runs() -> Reader:
    """Frames in the index code of a selector: whole runs of 4 entries, of which a last one is shorter."""
    codec = Runs(((0, 16), (16, 18), (20, 60)), 4, 5)
    shape = FrameShape(70, 18, 5, BF16(), codec.index_block)
    positions = torch.cat([torch.arange(*each, dtype=torch.int32) for each in ((4, 8), (16, 18), (20, 28), (56, 60))])
    codes, scale = BF16().encode(torch.arange(23.0))
    valid = [_bytes_of(shape.write(positions, codes, scale, step=7, bucket=2))]

    def read(data: bytes) -> None:
        contents = shape.read(_tensor(data), step=7, bucket=2, peer=1)
        if not contents.overflow:
            _check_positions(contents.positions, 70, 18)

    return Reader("frames of whole runs", valid, read, frame_at=0)


def _codes(codec: type[IndexCodec]) -> Reader:
    shapes = [
        (n, k) for n, k in ((70, 20), (2**31 - 1, 5), (200, 199), (64, 1), (9, 9), (5, 0)) if codec.can_code(n, k)
    ]
    valid = []
    for number, (n, k) in enumerate(shapes):
        if (codec.num_words(n, k) or 0) < 1000:  # a map of 2^31 entries is no small one
            few = torch.linspace(0, n - 1, k, dtype=torch.float64).to(torch.int32)
            valid.append(bytes([number, 0, 0, 0]) + _bytes_of(codec.encode(few, n)))

    def read(data: bytes) -> None:
        n, k = shapes[data[0] % len(shapes) if data else 0]
        words = _tensor(data[4 : len(data) // 4 * 4]).view(torch.int32)
        foretold = codec.num_words(n, k)
        if words.numel() != foretold and (foretold is not None or not words.numel()):
            raise FrameError("a frame foretells its length")
        _check_positions(codec.decode(words, n, k), n, k)

    return Reader(f"index codes of {codec.__name__}", valid, read)


def _gossip() -> Iterator[Reader]:
    torch.manual_seed(1)
    model = Small()
    scheme = parse("gossip:rho=0.1,quantize=none")
    chosen = ModelVector(model, "model", scheme.select.dense_below)  # type: ignore[union-attr]
    by_tensor = ModelVector(model, "tensor")
    writers: dict[str, tuple[MessageWriter, list[list[int]], int]] = {
        "groups": (GroupMessages(by_tensor, BF16()), [[0], [1, 3], [0, 1, 2]], 8),
        "entries": (EntryMessages(chosen, scheme.quantize, scheme.select, 4), [[0]], 0),  # type: ignore[union-attr, arg-type]
        "remainders": (ModuloMessages(by_tensor, ModuloCode(), 0, 0), [[0], [2]], 0),
    }
    for name, (messages, groups_of, frame_at) in writers.items():
        subsets = [messages.subset(groups) for groups in groups_of]
        asked = [messages.request_(subset, subset.read().clone()) for subset in subsets]
        told = [messages.open(request.message, 1) for request in asked]
        answers = [messages.reply_(topic, what, topic.read())[0] for topic, what in told]

        def open_(data: bytes, messages: MessageWriter = messages) -> None:
            topic, what = messages.open(_tensor(data), 1)
            way = messages.reply_(topic, what, topic.read())[1]
            assert way is not None and bool(way.isfinite().all())

        def settle(data: bytes, messages: MessageWriter = messages, asked: Any = asked) -> None:
            assert bool(messages.finish_(asked[0], _tensor(data), 1).isfinite().all())

        yield Reader(f"gossip's requests of {name}", [_bytes_of(q.message) for q in asked], open_, frame_at=frame_at)
        yield Reader(f"gossip's answers of {name}", [_bytes_of(answers[0])], settle, frame_at=0)


def _parts() -> Reader:
    layout = Layout.of(["few", "w"], [20, 150])
    scheme = parse(
        "scheme:select=topk(rho=0.1,dense_below=30),memory=residual,quantize=bf16,exchange=server(down_rho=0.2)"
    )
    assert isinstance(scheme, Scheme)
    owner = Owner(scheme, 0, 1)
    valid = []
    for k in (0, 3, 40):
        codes, scale = BF16().encode(torch.ones(20 + k))
        shape = FrameShape(layout.num_entries, k, 20, BF16())
        valid.append(_bytes_of(shape.write_smallest(_positions(150, k) + 20, codes, scale, step=7, bucket=2)))

    def read(data: bytes) -> None:
        parts = {0: _tensor(valid[1]), 1: _tensor(data)}
        answer = owner.answer(parts, layout, step=7, bucket=2)
        FrameShape.of(answer, layout.num_entries, [BF16()], peer=0).read(answer, step=7, bucket=2, peer=0)

    return Reader("parts at an owner", valid, read, frame_at=0)


def _layouts() -> Reader:
    layouts = [Layout.of(["a", "b"], [3, 40]), Layout.of(["weight"], [2**31 - 1])]
    valid = [_bytes_of(with_layout(layout, torch.arange(9, dtype=torch.uint8))) for layout in layouts]

    def read(data: bytes) -> None:
        layout, part = without_layout(_tensor(data), 1 << 32)
        assert layout.num_entries >= 0 and part.numel() <= len(data)

    return Reader("layouts at a server", valid, read, (ValueError, TypeError, RecursionError))


def _heads() -> Reader:
    """Whole messages, whose heads say what follows."""
    kinds = {Kind.PARTS: 64, Kind.SUM: 1 << 12, Kind.REQUEST: 8, Kind.ERROR: 0}
    messages = [
        Message(Kind.PARTS, 7, 2, torch.arange(12, dtype=torch.uint8)),
        Message(Kind.SUM, 7, 0, torch.arange(9.0), living=3, place=1),
        Message(Kind.REQUEST, payload=torch.arange(2, dtype=torch.int16), reply_bytes=5),
        Message(Kind.ERROR),
    ]

    def read(data: bytes) -> None:
        rooms, rest, message = rooms_of_message(kinds), data, None
        try:
            while True:
                room = next(rooms)
                if len(rest) < len(room):
                    raise FrameError("ends before its message does")
                room[:] = rest[: len(room)]
                rest = rest[len(room) :]
        except StopIteration as end:
            message = end.value
        assert message.payload.nbytes <= kinds[message.kind] and message.reply_bytes <= kinds[message.kind]
        assert b"".join(views_of(message)) == data[: len(data) - len(rest)]

    return Reader("heads of messages", [b"".join(views_of(message)) for message in messages], read)


def _states() -> Reader:
    states = ({"a": torch.arange(5.0), "b": (1, None, [True, "c"])}, [torch.zeros(0, 3), torch.ones(2, 2).half()], 2.5)

    def read(data: bytes) -> None:
        unpack(_tensor(data))

    return Reader("states of peers", [_bytes_of(pack(state)) for state in states], read)


def _members() -> Reader:
    """Messages of members; what is read is written alike."""
    payload = torch.arange(16, dtype=torch.uint8)
    words: list[Word] = [
        Join("desk", 5, "abc", 0.9, {"0": [["w", [2, 3]]]}),
        Drift(0, 3, 9, 512, 8, 0.25, {"loss": 1.5}, payload),
        Update(1, 4, True, 512, 2, 3, payload),
        Refusal("of another release"),
        Keys({"desk/5": "ab" * 32}, is_all=True),
        Roster(0, 3, 0, 1024, {"desk/5": 9, "lap/6": 10}, payload),
        Codes(0, "cd" * 32, payload),
    ]

    def read(data: bytes) -> None:
        word = read_word(Message(Kind.MEMBER, payload=_tensor(data)))
        again = read_word(write_word(word))
        assert str(named(word)) == str(named(again))

    def named(word: Word) -> dict[str, Any]:
        return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(word).items()}

    return Reader("messages of members", [_bytes_of(write_word(word).payload) for word in words], read)


def _grid_drifts() -> Reader:
    scheme = parse("streaming:bits=4,block=64")
    codec = codec_for(scheme.exchanged, Layout.of(["w"], [70]))
    payload, _ = codec.encode(torch.linspace(-1, 1, 70), (0,))

    def read(data: bytes) -> None:
        values = codec.decode(_tensor(data), torch.device("cpu"))
        assert values.shape == (70,) and bool(values.isfinite().all())

    return Reader("drifts of members on a grid", [_bytes_of(payload)], read)


def _schemes() -> Reader:
    def read(data: bytes) -> None:
        scheme = parse(data.decode(errors="replace"))
        assert parse(str(scheme)) == scheme

    texts = (*ALL_TEXTS, *gossip_texts(), *outer_texts())
    return Reader("scheme texts", [text.encode() for text in texts], read, (SchemeError,))


def _checkpoints() -> Reader:
    """A file and its manifest, of which one is a mutant: which one, its length tells."""
    in_memory = "/dev/shm"  # what a disk would take is no part of a reader
    home = tempfile.TemporaryDirectory(prefix="laconic-fuzz-", dir=in_memory if os.path.isdir(in_memory) else None)
    state = {"model": {"w": torch.arange(20.0)}, "step": 3, "names": ["a"], "held": {"x": torch.zeros(4, 5).half()}}
    about = {"scheme": "topk", "num_workers": 1, "model": {}}
    save_checkpoint(Path(home.name), 3, 0, state, FewWorkers(), about)
    there = find_checkpoint(Path(home.name)).folder
    whole = {path: path.read_bytes() for path in there.iterdir()}
    manifest, part = sorted(whole, key=lambda path: len(whole[path]))

    def read(data: bytes) -> None:
        mutant = part if len(data) > 2 * len(whole[manifest]) else manifest
        mutant.write_bytes(data)
        try:
            found = find_checkpoint(Path(home.name)).load()
        finally:
            mutant.write_bytes(whole[mutant])
        assert torch.equal(found[0]["model"]["w"], state["model"]["w"])  # type: ignore[index]

    return Reader("checkpoints", list(whole.values()), read, (TaskError,))


def build_native(folder: Path, *, optimize: str = "-O2") -> Path:
    """native_fuzz.cpp with the readers it drives; only those are sanitized, so that drawing mutants takes no longer."""
    driver, program = folder / "driver.o", folder / "native_fuzz"
    how = ("g++", *BUILT_ALIKE, optimize)
    subprocess.run(
        [*how, "-Wall", "-Wextra", "-Werror", "-c", ROOT / "tests/native_fuzz.cpp", "-o", driver], check=True
    )
    subprocess.run(
        [*how, *SANITIZED, driver, *(NATIVE / f"{name}.cpp" for name in READ_BY_NATIVE), "-o", program], check=True
    )
    return program


def run_native(program: Path, seed: int, num_mutants: int) -> list[dict[str, Any]]:
    """What it says of each reader; an error where one of them did not keep its promise."""
    ran = subprocess.run([program, str(seed), str(num_mutants)], check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def sanitized_environment(folder: Path) -> dict[str, str]:
    """That of a Python whose allocator is the address sanitizer's, and of the whole library built for it."""
    built = folder / "kernels.so"
    how = ("g++", *BUILT_ALIKE, "-O1", *SANITIZED, "-shared", "-fPIC")
    subprocess.run([*how, *sorted(NATIVE.glob("*.cpp")), "-o", built], check=True)
    runtime = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    options = "detect_leaks=0:malloc_context_size=2:quarantine_size_mb=16"
    return {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": options, _FUZZED: str(built)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="for each Python reader, and for the native ones")
    parser.add_argument("--mutants", type=int, default=sys.maxsize, help="most for each Python reader")
    parser.add_argument("--as-built", action="store_true", help="over the usual library instead of a sanitized one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collect", action="store_true", help="add to tests/corpus.json instead")
    parser.add_argument("--only", help="the reader of this name; 'native' for those of native_fuzz.cpp")
    asked = parser.parse_args()
    if asked.collect:
        collect()
        return 0
    if _FUZZED not in os.environ and shutil.which("g++") and not asked.as_built:
        with tempfile.TemporaryDirectory(prefix="laconic-fuzz-") as folder:
            if asked.only in (None, "native"):
                _fuzz_native(Path(folder), asked.seed, asked.seconds)
            environment = sanitized_environment(Path(folder))
            again = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
            return subprocess.run(again, cwd=ROOT, env=environment, check=False).returncode
    if _FUZZED in os.environ:
        library.path_of = lambda name: Path(os.environ[_FUZZED])
    torch.set_num_threads(1)
    for reader in readers():
        if asked.only in (None, reader.name):
            _fuzz(reader, asked.seed, asked.mutants, asked.seconds)
    return 0


def _fuzz_native(folder: Path, first_seed: int, seconds: float) -> None:
    program = build_native(folder)
    until = time.monotonic() + seconds
    for seed in count(first_seed):
        for row in run_native(program, seed, 1_000_000):
            print(json.dumps({"seed": seed, **row}), flush=True)
        if time.monotonic() > until:
            return


def _fuzz(reader: Reader, seed: int, num_mutants: int, seconds: float) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    faulthandler.dump_traceback_later(seconds + MOST_SECONDS, exit=True)
    row = reader.run(seed, num_mutants, seconds)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"seed": seed, **row}), flush=True)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > MOST_BYTES:
        sys.exit(f"{reader.name}, seed {seed}, took {grown} bytes")


if __name__ == "__main__":
    sys.exit(main())
