"""Checkpoints on disk: whole or not there, two generations, and a line for whatever is wrong with one."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from laconic.transport import InProcess, in_process
from laconic_lab.errors import LaunchError, TaskError
from laconic_lab.train import resume
from laconic_lab.train.checkpoint import Checkpoint, find_checkpoint, forget_after, save_checkpoint
from tests.workers import FewWorkers


def save(folder: Path, step: int, rank: int = 0, state: Any = None, workers: FewWorkers | None = None) -> str:
    whole = {"w": torch.full((300,), float(step))} | (state or {})
    about = {"scheme": "topk", "num_workers": 1, "model": {}}
    return save_checkpoint(folder, step, rank, whole, workers or FewWorkers(), about)[1]


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def found(folder: Path) -> tuple[float, Sequence[str]]:
    """What the newest whole checkpoint holds, and what is said of it."""
    checkpoint = find_checkpoint(folder)
    (state,) = checkpoint.load()
    return float(state["w"][0]), checkpoint.remarks


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        assert save(tmp_path, step) == ""
    assert steps_in(tmp_path) == ["step-20", "step-30"]
    assert found(tmp_path) == (30, [])
    assert save(tmp_path, 25) == ""  # of a run that went back to 20
    assert steps_in(tmp_path) == ["step-20", "step-25"]
    assert save(tmp_path, 25, state={"w": torch.zeros(1)}) == ""
    assert found(tmp_path) == (0, [])


def test_what_is_renamed_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    really_fsync = os.fsync
    really_rename = os.rename

    def fsync(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        really_fsync(handle)

    def rename(old: Path, new: Path) -> None:
        done.append(f"{old.name} -> {new.name}")
        really_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path, 10)
    assert done == ["rank-0.pt", "manifest.json", "step-10.new", "step-10.new -> step-10", "checkpoint"]


def test_a_death_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for deaths in ([1, 0], [0, 1]):
        save(tmp_path, 20, workers=FewWorkers(0, 3, deaths))
        assert found(tmp_path) == (10, [])
    save(tmp_path, 30, rank=2, workers=FewWorkers(1, 3, [1, 0]))  # the leader made no folder
    assert found(tmp_path) == (10, [])
    save(tmp_path, 20)
    assert steps_in(tmp_path) == ["step-10", "step-20"]  # nothing is left of those that were not finished


def _flip(part: Path) -> None:
    there = bytearray(part.read_bytes())
    there[len(there) // 2] ^= 1
    part.write_bytes(there)


def _zeros(part: Path) -> None:
    with part.open("r+b") as file:
        file.seek(64)
        file.write(bytes(1 << 20))


def _cut(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("rank-0.pt", _flip, "rank-0.pt is damaged"),
        ("rank-0.pt", _zeros, "rank-0.pt is damaged"),
        ("rank-0.pt", _cut, "rank-0.pt is damaged"),
        ("rank-0.pt", Path.unlink, "rank-0.pt is missing"),
        ("manifest.json", _flip, "manifest.json is damaged"),
        ("manifest.json", _cut, "manifest.json is damaged"),
    ],
)
def test_what_has_rotted_is_noticed_and_the_older_one_is_loaded(
    tmp_path: Path, name: str, spoil: Any, said: str
) -> None:
    for step in (10, 20):
        save(tmp_path, step, state={"more": torch.rand(1 << 19)})
    spoil(tmp_path / "checkpoint" / "step-20" / name)
    value, remarks = found(tmp_path)
    assert value == 10 and len(remarks) == 1 and said in remarks[0] and remarks[0].endswith("; going on from step 10")
    spoil(tmp_path / "checkpoint" / "step-10" / name)
    forget_after(tmp_path, 10)
    save(tmp_path, 30)  # at which what is damaged makes room, not what is whole
    assert steps_in(tmp_path) == ["step-10", "step-30"]
    spoil(tmp_path / "checkpoint" / "step-30" / name)
    save(tmp_path, 30)
    assert found(tmp_path) == (30, [])
    spoil(tmp_path / "checkpoint" / "step-30" / name)
    with pytest.raises(TaskError, match=f"{said}; put a copy of it there, or leave --resume out to start afresh"):
        find_checkpoint(tmp_path)


class _Met(FewWorkers):
    """Virtual workers as a job's."""

    def __init__(self, transport: InProcess) -> None:
        super().__init__(transport.rank, transport.num_workers)
        self._transport = transport

    def gather(self, mine: Sequence[float]) -> list[list[float]]:
        rows: list[list[float]] = self._transport.all_gather(torch.tensor(mine, dtype=torch.float64), "").tolist()
        return rows


def test_workers_look_at_each_file_once_among_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    really_digest = hashlib.file_digest

    def digest(file: Any, name: str) -> Any:
        looked_at.append(str(Path(file.name).relative_to(tmp_path / "checkpoint")))
        return really_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", digest)

    def work(transport: InProcess) -> Checkpoint:
        group = _Met(transport)
        for step in (10, 20):
            save(tmp_path, step, transport.rank, workers=group)
        if transport.rank == 0:
            (tmp_path / "checkpoint" / "step-20" / "rank-1.pt").write_bytes(b"")
        group.gather([])
        return find_checkpoint(tmp_path, group)

    for checkpoint in in_process(3, work):
        assert checkpoint.step == 10 and "rank-1.pt is damaged; going on from step 10" in checkpoint.remarks[0]
    assert sorted(looked_at) == [f"step-{step}/rank-{rank}.pt" for step in (10, 20) for rank in range(3)]


def test_a_death_while_a_checkpoint_is_looked_at_leaves_no_file_unseen(tmp_path: Path) -> None:
    def work(transport: InProcess) -> None:
        save(tmp_path, 10, transport.rank, workers=_Met(transport))

    in_process(2, work)
    (tmp_path / "checkpoint" / "step-10" / "rank-1.pt").write_bytes(b"")
    with pytest.raises(TaskError, match=r"rank-1.pt is damaged"):  # which the one that died was to look at
        find_checkpoint(tmp_path, FewWorkers(0, 2, deaths=(1,)))


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = tmp_path / "checkpoint" / "step-10" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["about"]["scheme"] = "topl"
    path.write_text(json.dumps(manifest))
    with pytest.raises(TaskError, match=r"manifest.json is damaged"):
        find_checkpoint(tmp_path)


def _sign(manifest: Path, about: Any) -> None:
    """Write a manifest that vouches for anything."""
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    manifest.write_text(json.dumps({"sha256": digest, "about": about}))


@pytest.mark.parametrize("name", ["../../../precious", "/{0}/precious", "rank-0.pt/../../../../precious", ""])
def test_a_manifest_cannot_have_files_deleted_that_we_did_not_write(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.touch()
    for step in (10, 20):
        save(tmp_path / "out", step)
    path = tmp_path / "out" / "checkpoint" / "step-10" / "manifest.json"
    about = json.loads(path.read_text())["about"]
    _sign(path, about | {"files": {name.format(tmp_path): {"bytes": 0, "sha256": ""}}})
    save(tmp_path / "out", 30)
    assert precious.exists() and steps_in(tmp_path / "out") == ["step-20", "step-30"]


def test_a_signed_manifest_of_nonsense_is_one_line(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = tmp_path / "checkpoint" / "step-10" / "manifest.json"
    about = json.loads(path.read_text())["about"]
    part = about["files"]["rank-0.pt"]
    values: list[Any] = [None, -5, "", [], {}, {"": {}}, [[]]]
    changes: list[dict[str, Any]] = [
        *({name: value} for name in about if name != "laconic" for value in values),
        *({"files": {"rank-0.pt": part | change}} for change in ({"bytes": -5}, {"bytes": "9"}, {"sha256": 3})),
    ]
    nonsense: list[Any] = [[], "about", None, 7, *(about | change for change in changes if about | change != about)]
    for wrong in nonsense:
        if isinstance(wrong, dict) and wrong["scheme"] == "":
            continue  # which is no scheme, as a job is told that resumes it
        _sign(path, wrong)
        with pytest.raises(TaskError, match=r"manifest.json is damaged|whose format this version"):
            find_checkpoint(tmp_path)


def test_a_run_whose_last_checkpoint_is_not_saved_fails(tmp_path: Path) -> None:
    class OneIsFull(FewWorkers):
        def gather(self, own: Sequence[float]) -> list[list[float]]:
            return [list(own), [1.0, 0.0, *[0.0] * 8][: len(own)]]

    about = {"scheme": "topk", "num_workers": 1, "model": {}}
    loop = SimpleNamespace(job=SimpleNamespace(out=tmp_path), steps_done=10, is_saved=True)
    for workers in (FewWorkers(), OneIsFull(0, 2)):
        loop.is_saved, _ = save_checkpoint(tmp_path, 10, 0, {}, workers, about)
        if loop.is_saved:
            resume.check_saved(loop)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="step 10 was trained, but not saved"):
        resume.check_saved(loop)  # type: ignore[arg-type]


def test_a_full_disk_is_a_line_and_the_one_before_is_kept(tmp_path: Path) -> None:
    save(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        said = save(tmp_path, 20, state={"more": torch.rand(1 << 19)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (
        said.startswith("step 20 is not saved: File too large (")
        and "give --out room enough" in said
        and "\n" not in said
    )
    assert found(tmp_path) == (10, []) and steps_in(tmp_path) == ["step-10"]
    assert save(tmp_path, 30) == ""


def test_who_hears_that_another_could_not_write_does_not_count_it(tmp_path: Path) -> None:
    save(tmp_path, 10)

    class OneIsFull(FewWorkers):
        def gather(self, own: Sequence[float]) -> list[list[float]]:
            return [list(own), [1, 0, *[0] * 8]]

    assert save(tmp_path, 20, workers=OneIsFull(0, 2)) == ""
    assert found(tmp_path) == (10, [])


@pytest.mark.parametrize("meeting", [1, 2, 3])
def test_what_does_not_count_is_removed_where_who_led_has_died(tmp_path: Path, meeting: int) -> None:
    class FirstDies(FewWorkers):
        num_meetings = 0

        def gather(self, own: Sequence[float]) -> list[list[float]]:
            self.num_meetings += 1
            if self.num_meetings == meeting:
                self.place, self.num_living = 0, 1
            return super().gather(own)

    save(tmp_path, 10)
    save(tmp_path, 20, rank=1, workers=FirstDies(1, 2))
    assert found(tmp_path) == (10, []) and steps_in(tmp_path) == ["step-10"]


@pytest.mark.parametrize("others", [[], ["rank-1.pt"]])
def test_who_was_left_behind_removes_its_part_alone(tmp_path: Path, others: list[str]) -> None:
    class LeftBehind(FewWorkers):
        def gather(self, own: Sequence[float]) -> list[list[float]]:
            if len(own) > 1:
                for name in others:
                    (tmp_path / "checkpoint" / "step-20.new" / name).touch()
                raise LaunchError("the others have gone on")
            return super().gather(own)

    save(tmp_path, 10)
    with pytest.raises(LaunchError):
        save(tmp_path, 20, workers=LeftBehind(0, 2))
    assert steps_in(tmp_path) == ["step-10", *["step-20.new"] * len(others)], "the part of another may count with it"


def test_a_part_on_a_disk_of_another_host_is_missed_at_once(tmp_path: Path) -> None:
    class Elsewhere(FewWorkers):
        def gather(self, own: Sequence[float]) -> list[list[float]]:
            return [list(own), [1, *own[1:]]]

    said = save(tmp_path, 20, workers=Elsewhere(0, 2))
    assert "No such file or directory" in said and "rank-1.pt" in said and "that all hosts share" in said


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    home = tmp_path / "checkpoint"
    (home / "step-5").mkdir(parents=True)
    (home / "step-5" / "model.safetensors").touch()
    with pytest.raises(TaskError, match="holds no checkpoint that laconic wrote; leave --resume out"):
        find_checkpoint(tmp_path)
    for step in (5, 10, 20, 30):
        said = save(tmp_path, step)
        assert ("step 5 is not saved: Directory not empty" in said) == (step == 5)
        (home / f"step-{step}" / "notes.txt").touch()
    assert (home / "step-5" / "model.safetensors").exists() and (home / "step-10" / "notes.txt").exists()
    assert found(tmp_path) == (30, [f"{home}/step-30/notes.txt is not of this checkpoint and is not read; remove it"])


def test_a_fresh_run_forgets_what_an_earlier_one_left(tmp_path: Path) -> None:
    forget_after(tmp_path, 0)
    for _ in range(2):
        save(tmp_path, 5)
        forget_after(tmp_path, 0)
        with pytest.raises(TaskError, match="holds no checkpoint"):
            find_checkpoint(tmp_path)
    save(tmp_path, 2)
    assert steps_in(tmp_path) == ["step-2"]


def test_another_format_and_another_model_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic_lab.train.checkpoint.FORMAT", 1)
    save(tmp_path, 5)
    monkeypatch.undo()
    with pytest.raises(TaskError, match=r"step-5 is of laconic 0.1.0, whose format this version does not read"):
        find_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint")
    saved = Checkpoint(tmp_path, 5, {"model": resume.layout_of(nn.Linear(3, 2))}, [])
    resume.check_layout(saved, nn.Linear(3, 2))
    with pytest.raises(TaskError, match=r"weight is \[2, 3\] torch.float32 there and \[2, 4\] torch.float32 here"):
        resume.check_layout(saved, nn.Linear(4, 2))
    with pytest.raises(TaskError, match=r"bias is \[2\] torch.float32 there and not here"):
        resume.check_layout(saved, nn.Linear(3, 2, bias=False))
