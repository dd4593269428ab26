"""Build both wheels, install them in a clean environment, and use them: the first script, commands, kernels, relay.

With `--python python3.11 --torch 2.6.0` it tries the oldest of both, which no CI does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_INSIDE = """
import sys
from pathlib import Path
import laconic, torch
from laconic_lab.network import netlink
folder = Path(laconic.__file__).parent
assert str(folder).startswith(sys.prefix), f"{folder} is not the wheel's"
assert list(folder.glob("kernels/cpu/kernels_*.so")), "no native kernels in the wheel"
assert list(folder.glob("transport/*.so")), "no native sockets in the wheel"
assert not list(folder.glob("**/*.xz")) and not list(folder.glob("**/*.cpp")), "the wheel holds data or sources"
assert netlink.RELAY.exists(), "no relay in the wheel"
print("Python", sys.version.split()[0] + ", torch", torch.__version__)
"""
_LAB = """
from laconic_lab.errors import LabError
from laconic_lab.network import netlink
try:
    netlink.require()
except LabError as error:
    print(error)
"""


def main() -> None:
    """Build, install, use; an error where one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="that makes the environment")
    parser.add_argument("--torch", metavar="VERSION", help="instead of the one in constraints.txt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="laconic-wheel-") as folder:
        try_wheel(Path(folder), args.python, args.torch)


def try_wheel(folder: Path, python: str = sys.executable, torch: str | None = None) -> None:
    """Everything inside `folder`, a new one."""
    constraints = folder / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text()
    constraints.write_text(re.sub(r"^torch==.*$", f"torch=={torch}", pinned, flags=re.M) if torch else pinned)
    _run([python, "-m", "venv", folder / "venv"])
    inside = folder / "venv" / "bin"
    pip: list[str | Path] = [inside / "python", "-m", "pip", "--quiet"]
    for project in (ROOT, ROOT / "lab"):
        _run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, project], pip_constraint=constraints)
    (wheel,), (lab,) = folder.glob("laconic-*.whl"), folder.glob("laconic_lab-*.whl")
    assert re.search(r"-py3-none-\w+\.whl$", wheel.name) and "-any." not in wheel.name, f"{wheel.name} holds no kernels"
    _run([*pip, "install", "--constraint", constraints, wheel])
    assert "topk" in _run([inside / "laconic", "schemes"])
    _run_first_script(folder, inside)
    refused = subprocess.run([inside / "laconic", "train"], capture_output=True, text=True, check=False)
    assert "pip install 'laconic[lab]'" in refused.stderr, refused.stderr
    _run([*pip, "install", "--constraint", constraints, lab])
    print(f"{wheel.name}:", _run([inside / "python", "-c", _INSIDE]).strip(), flush=True)
    _use(inside)


def _run_first_script(folder: Path, inside: Path) -> None:
    """Run the script of the first page, as its text has it, with the library alone."""
    script = folder / "script.py"
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.S)
    script.write_text(code)
    printed = _run([inside / "torchrun", "--nproc-per-node", "2", script])
    assert "20 steps (0 skipped), 2 workers" in printed, printed


def _use(inside: Path) -> None:
    laconic = inside / "laconic"
    assert _run([laconic, "--version"]).startswith("laconic ")
    assert "topk" in _run([laconic, "schemes"])
    small = ["--steps", "3", "--batch", "4", "--scheme", "topk:rho=0.1", "--json"]
    # Kernels asked for by name are used, or an error.
    trained = _run([laconic, "train", "--workers", "2", *small], laconic_kernels="cpu")
    assert json.loads(trained.splitlines()[-1])["steps"] == 3
    if why := _run([inside / "python", "-c", _LAB]):
        print(f"not tried, the relay: {why.strip()}", flush=True)
        return
    link = ["--hosts", "2", "--link", "50mbit", "--delay", "20ms", "--packets", "200"]
    measured = json.loads(_run([inside / "python", ROOT / "tools" / "lab_links.py", *link]))
    assert measured["ms one way by echo"] > 19, f"the relay is not used: {measured}"


def _run(words: Sequence[str | Path], **variables: str | Path) -> str:
    """What a command printed; an error with what it said where it fails."""
    args: Mapping[str, str] = {name.upper(): str(value) for name, value in variables.items()}
    # Neither this checkout nor this environment is to be seen.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ran = subprocess.run(
        [str(word) for word in words], cwd="/", env={**env, **args}, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\nended with {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return ran.stdout


if __name__ == "__main__":
    main()
