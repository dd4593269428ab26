"""Members over real connections: they join, leave, are killed and come back, and so does their server."""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
import laconic.cli
from laconic import PeerError, StateError
from laconic.fault_points import at_fault_point
from laconic.members import PageServer, prometheus_text, replay, run_stats
from laconic.members.messages import Offer
from tests.workers import wait_until

SCHEME = "streaming:every=4,fragments=2,delay=1,lr=1,momentum=0"


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


class Trainee:
    """A member with something to learn: the same function as all others, from data of its own."""

    def __init__(self, address: str, id: str, seed: int = 0, *, is_masked: bool = False, timeout_s: float = 30) -> None:
        self.model = _model(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.member = laconic.join(address, self.model, self.optimizer, id=id, timeout_s=timeout_s, is_masked=is_masked)
        self._generator = torch.Generator().manual_seed(hash(id) % 1000)

    def train(self, steps: int) -> float:
        loss = 0.0
        for _ in range(steps):
            x = torch.randn(32, 8, generator=self._generator)
            error = (self.model(x) - x.sum(1, keepdim=True).tanh()).square().mean()
            self.optimizer.zero_grad()
            error.backward()
            self.optimizer.step()
            loss = error.item()
            self.member.step(tokens=32, loss=loss)
        return loss

    def train_until(self, rounds: int) -> None:
        """Train until the run has made so many rounds."""
        deadline = time.monotonic() + 60
        while self.member.progress[1] < rounds:
            assert time.monotonic() < deadline, "the run does not go on"
            self.train(1)


def _serve_for_ever(errors: int, arguments: list[str]) -> None:
    torch.set_num_threads(1)  # a forked process has no threads of OpenMP, and would wait for them
    sys.stderr = os.fdopen(errors, "w")
    laconic.cli.main(["serve", *arguments])


@contextmanager
def _served(folder: Path, port: int = 0) -> Iterator[tuple[BaseProcess, str]]:
    """`laconic serve` in a process of its own, and its address."""
    arguments = ["--listen", f"127.0.0.1:{port}", "--scheme", SCHEME, "--state", str(folder), "--wait-budget", "2"]
    reads, writes = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve_for_ever, args=(writes, arguments))
    process.start()
    os.close(writes)
    try:
        with os.fdopen(reads) as errors:
            dialled = next(filter(None, (re.search(r"dial (\S+);", line) for line in errors)))
            yield process, dialled[1]
    finally:
        process.kill()
        process.join()


def test_a_later_member_gets_the_model_and_the_clock() -> None:
    with laconic.MemberServer(SCHEME, "127.0.0.1:0") as server:
        first = Trainee(server.address, "first")
        first.train_until(6)
        second = Trainee(server.address, "second", seed=9)
        assert second.member.progress[0] == server.stats()["tokens"] > 0
        for piece in second.member.memberships[0].replica.pieces.values():
            assert torch.equal(piece.read(), piece.anchor)
        versions = {n: piece.version for n, piece in second.member.memberships[0].replica.pieces.items()}
        assert sum(versions.values()) >= 5
        first.member.leave()
        second.member.leave()


def test_members_learn_together_and_leave() -> None:
    with laconic.MemberServer(SCHEME, "127.0.0.1:0") as server:
        trainees = [Trainee(server.address, f"m{i}") for i in range(3)]
        losses: dict[str, float] = {}

        def work(trainee: Trainee) -> None:
            losses[trainee.member.id] = trainee.train(150)
            trainee.member.leave()

        threads = [threading.Thread(target=work, args=(trainee,)) for trainee in trainees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(losses) == 3
        assert max(losses.values()) < 0.2
        stats = server.stats()
        assert stats["num_members"] == 0
        assert all(member["residual_norm"] == 0 for member in stats["members"]), "nothing stays behind"
        assert stats["tokens"] <= 3 * 150 * 32 + 3 * 64 * 32  # bequests weigh as much as their member's last drift
        fields = trainees[0].member.stats()
        assert fields.rounds > 5
        assert trainees[0].member.metrics()["rounds"] == fields.rounds


def test_a_server_that_is_killed_continues_from_its_folder(tmp_path: Path) -> None:
    with _served(tmp_path) as (process, address):
        trainee = Trainee(address, "m")
        trainee.train_until(5)
        process.kill()
        process.join()
        before = trainee.member.progress[1]
        trainee.train(20)  # nobody waits for it
        with _served(tmp_path, int(address.rpartition(":")[2])):
            trainee.train_until(before + 4)
            assert trainee.member.stats().reconnects >= 1
            assert run_stats(address)["rounds"] >= before + 4
            trainee.member.leave()


def test_who_comes_back_joins_before_it_sends_anything(tmp_path: Path) -> None:
    may_offer = threading.Event()
    may_offer.set()

    def delay(word: object) -> None:
        assert not isinstance(word, Offer) or may_offer.wait(60)

    with at_fault_point("members.send", delay):
        with laconic.MemberServer(SCHEME, "127.0.0.1:0", state=tmp_path) as server:
            trainee = Trainee(server.address, "m")
            trainee.train_until(4)
        may_offer.clear()
        with laconic.MemberServer(SCHEME, server.address, state=tmp_path) as server:
            assert wait_until(lambda: trainee.member.stats().reconnects >= 1)
            trainee.train(16)
            may_offer.set()
            trainee.train_until(trainee.member.progress[1] + 4)
            trainee.member.close()


def train_for_ever(addresses: Connection, id: str) -> None:
    torch.set_num_threads(1)
    trainee = Trainee(addresses.recv(), id)
    addresses.send("in")
    while True:
        trainee.train(1)


def test_the_others_go_on_without_one_that_is_killed_or_stopped() -> None:
    fork = multiprocessing.get_context("fork")  # before the server has threads
    ends = {name: fork.Pipe() for name in ("killed", "stopped")}
    others = {name: fork.Process(target=train_for_ever, args=(theirs, name)) for name, (_, theirs) in ends.items()}
    for process in others.values():
        process.start()
    try:
        with laconic.MemberServer(SCHEME, "127.0.0.1:0", wait_budget_s=0.5) as server:
            trainee = Trainee(server.address, "stays")
            for own, _ in ends.values():
                own.send(server.address)
                assert own.recv() == "in"
            trainee.train_until(4)
            others["killed"].kill()
            os.kill(others["stopped"].pid or 0, signal.SIGSTOP)
            trainee.train_until(trainee.member.progress[1] + 8)
            os.kill(others["stopped"].pid or 0, signal.SIGCONT)
            trainee.train_until(trainee.member.progress[1] + 4)
            by_id = {member["id"]: member for member in server.stats()["members"]}
            assert by_id["stopped"]["is_there"]
            assert not by_id["killed"]["is_there"]
            trainee.member.leave()
    finally:
        for process in others.values():
            process.kill()
            process.join()


def test_wrong_models_ids_schemes_and_addresses_are_one_line(tmp_path: Path) -> None:
    with laconic.MemberServer(SCHEME, "127.0.0.1:0") as server:
        trainee = Trainee(server.address, "m")
        other = nn.Linear(3, 3)
        with pytest.raises(laconic.PeerError, match="model is another one"):
            laconic.join(server.address, other, torch.optim.SGD(other.parameters(), lr=0.1))
        with pytest.raises(laconic.PeerError, match="'m' is there already"):
            Trainee(server.address, "m")
        trainee.member.leave()
        with pytest.raises(laconic.StateError, match="has left"):
            trainee.train(1)
    with pytest.raises(laconic.LaunchError, match="cannot reach"):
        Trainee(server.address, "late")
    for scheme in ("topk", "gossip", "noloco"):
        with pytest.raises(laconic.SchemeError, match="outer steps that a server takes"):
            laconic.MemberServer(scheme, "127.0.0.1:0")
    with pytest.raises(laconic.SchemeError, match="host:port"):
        laconic.MemberServer(SCHEME, "7700")


def test_what_a_server_cannot_continue_is_one_line(tmp_path: Path) -> None:
    folder, tape = tmp_path / "run", tmp_path / "tape"
    with laconic.MemberServer(SCHEME, "127.0.0.1:0", state=folder, tape=tape) as server:
        with pytest.raises(StateError, match="run is in use by another server; end that one"):
            laconic.MemberServer(SCHEME, "127.0.0.1:0", state=folder)
        trainee = Trainee(server.address, "m")
        trainee.train_until(2)
        trainee.member.close()
    with pytest.raises(StateError, match="tape is the tape of another run; give another file"):
        laconic.MemberServer(SCHEME, "127.0.0.1:0", tape=tape)
    with pytest.raises(StateError, match=r"cannot read .*none \(.*\); give a tape of"):
        replay(tmp_path / "none")
    other = laconic.parse(SCHEME.replace("delay=", "warmup=1,delay="))
    assert isinstance(other, laconic.OuterScheme)
    object.__setattr__(other, "label", str(laconic.parse(SCHEME)))  # as where a recipe's defaults have changed
    with pytest.raises(StateError, match="is of other rounds than trigger=rounds"):
        laconic.MemberServer(other, "127.0.0.1:0", state=folder)
    whole = (folder / "fragment-0.npz").read_bytes()
    place = whole.index(b"\x93NUMPY") + 200  # amid the entries of a vector
    flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for damaged in (b"nonsense", b"", whole[: len(whole) // 2], flipped):
        (folder / "fragment-0.npz").write_bytes(damaged)
        with pytest.raises(StateError, match=r"fragment-0.npz is no state of a fragment \(\w+\); restore it"):
            laconic.MemberServer(SCHEME, "127.0.0.1:0", state=folder)
    for wrong in (tape, tape / "below", Path("/proc/none")):
        with pytest.raises(StateError, match=r"cannot keep a run in .* \(.*\); give a folder that can be written"):
            laconic.MemberServer(SCHEME, "127.0.0.1:0", state=wrong)


def test_a_server_logs_who_comes_and_goes_and_who_fails_the_handshake(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "laconic.members"), laconic.MemberServer(SCHEME, "127.0.0.1:0") as server:
        trainee = Trainee(server.address, "m")
        with pytest.raises(PeerError, match="'m' is there already"):
            Trainee(server.address, "m")
        host, port = server.address.split(":")
        for _ in range(3):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1" + 200 * b" ")
        assert wait_until(lambda: "failed the handshake" in caplog.text)
        trainee.member.leave()
        other = Trainee(server.address, "n")
        other.member.close()
        assert wait_until(lambda: "member 'n' is gone" in caplog.text)
    assert "member 'm' joined from 127.0.0.1" in caplog.text
    assert "is refused: a member called 'm' is there already" in caplog.text and "member 'm' leaves" in caplog.text
    assert caplog.text.count("failed the handshake") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("serve --quorum 0", "quorum is 0; give 1 or more"),
        ("serve --wait-budget -1", "wait_budget_s is -1.0; give 0 or more seconds"),
        ("serve --scheme topk", "topk has no outer steps that a server takes; use one like streaming or sparseloco"),
        ("serve --scheme streeming", "unknown recipe 'streeming'; did you mean 'streaming'?"),
        ("serve --mask-bits 8 --combine clipped", "compares single drifts, which masks hide; use mean"),
        ("serve --listen 7700", "'7700' is no address; write it as host:port, like 0.0.0.0:7700"),
        ("serve --listen 127.0.0.1:0 --metrics 9100x", "'9100x' is no address; write it as host:port"),
        ("serve --listen TAKEN", "Address already in use"),
        ("members 127.0.0.1:9", "see that `laconic serve` runs there"),
    ],
)
def test_a_wrong_command_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with laconic.MemberServer(SCHEME, "127.0.0.1:0") as server:
        assert laconic.cli.main(words.replace("TAKEN", server.address).split()) != 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("laconic: ")
    assert line in last


def test_serve_ends_quietly_when_interrupted(tmp_path: Path) -> None:
    with _served(tmp_path) as (process, _):
        os.kill(process.pid or 0, signal.SIGINT)
        process.join(20)
        assert process.exitcode == 0


def test_the_manifest_and_the_dashboard_fit_what_there_is() -> None:
    yaml = pytest.importorskip("yaml")
    folder = Path(__file__).parents[2] / "examples" / "launch"
    _, server, member = yaml.safe_load_all((folder / "members.yaml").read_text())
    (container,) = server["spec"]["template"]["spec"]["containers"]
    program, *words = container["command"]
    options = laconic.cli.all_commands().parse_args(words)
    assert program == "laconic"
    assert options.state == container["volumeMounts"][0]["mountPath"]
    (container,) = member["spec"]["template"]["spec"]["containers"]
    assert (folder / container["command"][1]).exists()
    names = {each["name"] for each in container["env"]}
    assert names == {"LACONIC_SERVER", "LACONIC_SECRET"}
    with laconic.MemberServer(SCHEME, "127.0.0.1:0") as running:
        known = set(re.findall(r"# TYPE (\w+)", prometheus_text(running.stats())))
    used = set(re.findall(r"laconic_\w+", (folder / "grafana-members.json").read_text()))
    assert used <= known


def test_who_does_not_know_the_secret_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_SECRET", "one")
    with laconic.MemberServer(SCHEME, "127.0.0.1:0") as server:
        monkeypatch.setenv("LACONIC_SECRET", "another")
        with pytest.raises(laconic.LaunchError, match="same secret"):
            Trainee(server.address, "m")
        assert server.stats()["members"] == []


def test_a_run_whose_state_cannot_be_written_ends_in_one_line(tmp_path: Path) -> None:
    with laconic.MemberServer(SCHEME, "127.0.0.1:0", state=tmp_path / "run") as server:
        trainee = Trainee(server.address, "m")
        shutil.rmtree(tmp_path / "run")
        trainee.train(8)
        with pytest.raises(laconic.StateError, match="cannot write the run"):
            server.wait()
        trainee.train(8)  # nobody waits for it
        trainee.member.close()


def test_who_cannot_hand_over_states_what_is_lost() -> None:
    with laconic.MemberServer("local:every=64", "127.0.0.1:0") as server:
        trainee = Trainee(server.address, "m", timeout_s=3)
        trainee.train(5)
    owed = trainee.member.memberships[0].replica.uncounted_norm
    assert owed > 0
    with pytest.raises(PeerError, match=re.escape(f"up to a drift of norm {owed:.3g} is lost")):
        trainee.member.leave(1)


def test_a_defect_ends_the_server_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look alive, and close no round any more."""
    with laconic.MemberServer(SCHEME, "127.0.0.1:0") as server:
        trainee = Trainee(server.address, "m")

        def broken(*_: object) -> None:
            raise RuntimeError("storage_offset() must be divisible by 2")

        monkeypatch.setattr(server.syncer, "on_drift", broken)
        trainee.train(4)
        with pytest.raises(PeerError, match="a message of member 'm' ended in RuntimeError, a defect of laconic"):
            server.wait()
        trainee.member.close()


def test_lockstep_repeats_bit_for_bit() -> None:
    def run() -> list[torch.Tensor]:
        with laconic.MemberServer(SCHEME, "127.0.0.1:0", quorum=2, is_lockstep=True) as server:
            trainees = [Trainee(server.address, f"m{i}") for i in range(2)]
            threads = [threading.Thread(target=trainee.train, args=(24,)) for trainee in trainees]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            for trainee in trainees:
                trainee.member.close()
            return [piece.anchor for piece in trainees[0].member.memberships[0].replica.pieces.values()]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_several_servers_share_the_fragments() -> None:
    with (
        laconic.MemberServer(SCHEME, "127.0.0.1:0") as first,
        laconic.MemberServer(SCHEME, "127.0.0.1:0") as second,
        laconic.MemberServer("streaming:every=8,fragments=2", "127.0.0.1:0") as other,
    ):
        both = f"{first.address},{second.address}"
        trainees = [Trainee(both, f"m{i}", seed=i) for i in range(2)]
        for name, parameter in trainees[0].model.state_dict().items():
            assert torch.equal(parameter, trainees[1].model.state_dict()[name]), "one model founded both runs"
        while not all(min(server.stats()["versions"].values()) > 2 for server in (first, second)):
            for trainee in trainees:
                trainee.train(1)
        shares = [server.stats()["versions"] for server in (first, second)]
        assert [list(versions) for versions in shares] == [[0], [1]]
        state = trainees[0].member.state_dict()
        with pytest.raises(laconic.StateError, match="with 2 servers"):
            laconic.join(first.address, _model(), torch.optim.SGD(_model().parameters(), lr=0.1), state=state)
        with pytest.raises(laconic.PeerError, match="model is another one"):
            Trainee(f"{second.address},{first.address}", "swapped")
        with pytest.raises(laconic.PeerError, match="serve one scheme"):
            Trainee(f"{first.address},{other.address}", "mixed")
        with pytest.raises(laconic.SchemeError, match="3 servers cannot share 2 fragments"):
            Trainee(f"{both},{first.address}", "too many")
        for trainee in trainees:
            trainee.member.leave()
        assert first.stats()["num_members"] == second.stats()["num_members"] == 0


def _crash(trainee: Trainee) -> dict[str, Any]:
    """Save a checkpoint, and end without a word."""
    state = {"model": trainee.model.state_dict(), "member": trainee.member.state_dict()}
    saved: dict[str, Any] = copy.deepcopy(state)
    trainee.member.close()
    return saved


def _awaits_a_result(trainee: Trainee) -> bool:
    (replica,) = trainee.member.state_dict()["replicas"]
    return any(piece["sent"] for piece in replica["pieces"].values())


def test_a_member_that_restarts_continues_from_its_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    scheme = "sparseloco:every=2,rho=0.1,chunk=8,decay=1"  # which leaves much behind
    with laconic.MemberServer(scheme, "127.0.0.1:0") as server:
        trainee = Trainee(server.address, "m")
        trainee.train_until(4)
        while _awaits_a_result(trainee):  # or the drift comes back to the residual, if the server has not counted it
            assert wait_until(lambda: server.stats()["rounds"] > trainee.member.stats().rounds)
            trainee.train(1)
        residual_norm = trainee.member.stats().residual_norm
        saved = _crash(trainee)
        assert wait_until(lambda: not server.stats()["num_members"])
        model = _model(seed=3)
        model.load_state_dict(saved["model"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with pytest.raises(laconic.StateError, match="of the member 'm'"):
            laconic.join(server.address, model, optimizer, id="n", state=saved["member"])
        with pytest.raises(laconic.StateError, match="no state of a member"):
            laconic.join(server.address, model, optimizer, state={"id": "m"})
        member = laconic.join(server.address, model, optimizer, state=saved["member"])
        assert residual_norm > 0
        assert member.id == "m"
        assert member.stats().residual_norm == pytest.approx(residual_norm)
        assert server.stats()["lost_norm"] == 0
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        member.close()
        assert wait_until(lambda: not server.stats()["num_members"])
        Trainee(server.address, "m").member.leave()
        assert server.stats()["lost_norm"] == pytest.approx(residual_norm, rel=0.5)
        assert "lost with the process" in caplog.text


def test_a_tape_replays_a_run_bit_for_bit(tmp_path: Path) -> None:
    def train(server: laconic.MemberServer) -> None:
        trainees = [Trainee(server.address, f"m{i}", seed=i) for i in range(3)]
        threads = [threading.Thread(target=trainee.train, args=(60,)) for trainee in trainees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        trainees[0].member.leave()
        for trainee in trainees[1:]:
            trainee.member.close()

    tape = tmp_path / "run.tape"
    for _ in range(2):  # the second server continues the run of the first
        with laconic.MemberServer(SCHEME, "127.0.0.1:0", state=tmp_path / "run", tape=tape) as server:
            train(server)
        with tape.open("ab") as file:
            file.write(b"cut short")
    again = replay(tape)
    assert again.rounds == server.syncer.rounds > 4
    for number, fragment in server.syncer.fragments.items():
        assert torch.equal(again.fragments[number].anchor, fragment.anchor)
        assert torch.equal(again.fragments[number].residual, fragment.residual)
    tape.write_bytes(b"nonsense")
    with pytest.raises(laconic.StateError, match="is no tape"):
        replay(tape)
    with pytest.raises(laconic.StateError, match="how this run began"):
        laconic.MemberServer(SCHEME, "127.0.0.1:0", state=tmp_path / "run", tape=tmp_path / "late.tape")


def test_the_page_and_the_metrics_tell_who_is_there() -> None:
    with laconic.MemberServer(SCHEME, "127.0.0.1:0") as server:
        page = PageServer(server, "127.0.0.1:0")
        trainee = Trainee(server.address, 'a "b"')
        trainee.train_until(3)
        with urllib.request.urlopen(f"http://{page.address}/stats.json") as reply:
            stats = json.load(reply)
        assert [member["id"] for member in stats["members"]] == ['a "b"']
        assert stats["members"][0]["loss"] > 0
        with urllib.request.urlopen(f"http://{page.address}/metrics") as reply:
            text = reply.read().decode()
        assert "laconic_run_num_members 1\n" in text
        assert 'laconic_member_is_there{id="a \\"b\\""} 1.0' in text
        assert text.count("# TYPE") == prometheus_text(stats).count("# TYPE")
        with urllib.request.urlopen(f"http://{page.address}/") as reply:
            assert b"Members of a run" in reply.read()
        page.close()
        trainee.member.leave()
