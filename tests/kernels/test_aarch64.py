"""The aarch64 build of the native kernels, under emulation where there is no such machine, bit for bit as x86-64's.

After `apt-get install cmake g++-aarch64-linux-gnu qemu-user`: `pytest tests/test_kernels_aarch64.py -m slow`, 45 s of
a core. What the x86-64 build computes, tests/test_kernels.py holds to the reference. Emulation says nothing of speed.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from laconic.kernels.cpu import library

ROOT = Path(__file__).parents[2]
CROSS = "aarch64-linux-gnu-g++"
MISSING = [tool for tool in ("cmake", "g++", CROSS, "qemu-aarch64") if shutil.which(tool) is None]


def run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def digests_of(kernels: Path, folder: Path, compiler: str, *emulator: str) -> list[str]:
    """What native_digests.cpp prints with this shared object."""
    program = folder / f"digests_{kernels.stem}"
    flags = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-pthread")
    run(compiler, *flags, ROOT / "tests/native_digests.cpp", kernels, f"-Wl,-rpath,{kernels.parent}", "-o", program)
    return run(*emulator, program).splitlines()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares x86-64 with aarch64, on a machine of the former")
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}; see the head of this file")
@pytest.mark.skipif(not library.levels(), reason=library.HOW_TO_GET_THEM)
def test_every_kernel_gives_the_same_bits_on_aarch64(tmp_path: Path) -> None:
    cross = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}")
    run("cmake", "-S", ROOT, "-B", tmp_path, *cross)
    run("cmake", "--build", tmp_path, "--parallel", "2")
    here = Path(library.__file__).parent / f"kernels_{library.level()}.so"
    expected = digests_of(here, tmp_path, "g++")
    found = digests_of(tmp_path / "kernels_neon.so", tmp_path, CROSS, "qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
    assert [line for line, other in zip(found, expected, strict=True) if line != other] == []
    assert {line.split(",")[0] for line in found} == set(library.SIGNATURES)
