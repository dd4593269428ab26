"""The tutorial notebook runs, and shows what its cells draw."""

from __future__ import annotations

import json

from run_tutorial import NOTEBOOK, outputs_of


def test_the_tutorial_runs_and_shows_its_pictures() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    stored = [[each["output_type"] for each in cell["outputs"]] for cell in cells if cell["cell_type"] == "code"]
    assert [[each["output_type"] for each in outputs] for outputs in outputs_of(cells)] == stored
    assert sum(kinds.count("display_data") for kinds in stored) == 3
    assert NOTEBOOK.stat().st_size < 150_000
    assert all(len(line.rstrip("\n")) <= 90 for cell in cells for line in cell["source"])
