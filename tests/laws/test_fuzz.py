"""The corpus and a few mutants through every reader; `make fuzz` tries more, with the sanitizers beneath."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import fuzz


@pytest.mark.parametrize("reader", fuzz.readers(), ids=lambda reader: reader.name)
def test_mutants_are_refused_or_valid(reader: fuzz.Reader) -> None:
    for valid in reader.valid:
        reader.read(valid)
    assert reader.run(seed=1, num_mutants=100, seconds=1000)["mutants"] == 100


def test_the_corpus_is_small_and_names_every_reader() -> None:
    assert set(fuzz.corpus()) == {reader.name for reader in fuzz.readers()} and all(fuzz.corpus().values())
    assert fuzz.CORPUS.stat().st_size < 16_000


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_native_readers_stay_in_their_bounds(tmp_path: Path) -> None:
    for row in fuzz.run_native(fuzz.build_native(tmp_path, optimize="-O0"), 1, 20_000):
        assert 0 < row["taken for valid"] <= row["mutants"]
