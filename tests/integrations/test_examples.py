"""The scripts of the pages run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted({*EXAMPLES.glob("with_*.py")} - {EXAMPLES / "with_torchft.py"})  # which test_torchft.py runs
AS_TORCHRUN = """\
import os
os.environ |= {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0",
               "TORCHELASTIC_RUN_ID": "test", "TMPDIR": os.path.dirname(__file__)}
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_of_a_page_runs(script: Path, tmp_path: Path) -> None:
    copy = tmp_path / script.name
    copy.write_text(AS_TORCHRUN + script.read_text())
    codes, printed = run_script(copy, 2)
    assert codes == [0, 0], printed
    steps = 10 if "transformers" in script.name else 20
    assert printed.count(f"{steps} steps (0 skipped), 2 workers") == 2, printed
