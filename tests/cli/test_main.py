"""The command `laconic` where the lab is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from laconic import cli


@pytest.mark.parametrize(
    "words", ["train", "train --steps 3", "lab run --hosts 2 -- ls", "soak", "demo", "bench step --json"]
)
def test_a_command_of_the_lab_says_how_to_get_it(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["laconic.cli.main"], "entry_points", lambda group: [])
    assert cli.main(words.split()) == 2
    told = capsys.readouterr().err
    command, *_ = words.split()
    assert f"`laconic {command}` is a command of the lab" in told and "pip install 'laconic[lab]'" in told


def test_the_library_has_its_own_commands_without_the_lab(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["laconic.cli.main"], "entry_points", lambda group: [])
    assert cli.main(["schemes", "bf16"]) == 0 and "bits an entry" in capsys.readouterr().out


def test_a_shell_completes_commands_options_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion"]) == 0
    script = capsys.readouterr().out
    lines = {"laconic ser": "serve", "laconic serve --quo": "--quorum", "laconic train --scheme diloc": "diloco"}
    for line, whole in lines.items():
        words = " ".join(line.split())
        asked = f'COMP_WORDS=({words}); COMP_CWORD={len(line.split()) - 1}; _laconic; echo "${{COMPREPLY[@]}}"'
        ran = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True)
        assert ran.stdout.split() == [whole]
