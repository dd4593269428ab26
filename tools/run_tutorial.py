"""Run the cells of docs/tutorial.ipynb in one process, and store what they print and draw, in few colours.

python tools/run_tutorial.py        # after a change of its cells; tests/tools/test_tutorial.py runs them
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"
_DPI, _COLOURS = 75, 32


def outputs_of(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each cell of code prints and draws, as a notebook stores it; an error where one fails."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]).replace("plt.show()", ""), "tutorial", "exec"), scope)
        lines = printed.getvalue().splitlines(keepends=True)
        text = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
        outputs.append(text + [_picture(number) for number in plt.get_fignums()])
        plt.close("all")
    return outputs


def _picture(number: int) -> dict[str, Any]:
    drawn, small = io.BytesIO(), io.BytesIO()
    plt.figure(number).savefig(drawn, dpi=_DPI)
    Image.open(drawn).convert("RGB").quantize(_COLOURS).save(small, "PNG", optimize=True)
    data = {"image/png": base64.b64encode(small.getvalue()).decode()}
    return {"output_type": "display_data", "metadata": {}, "data": data}


if __name__ == "__main__":
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(code, outputs_of(code), strict=True), 1):
        cell |= {"execution_count": number, "outputs": outputs}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n")
