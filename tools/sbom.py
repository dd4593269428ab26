"""What a laconic of this environment is made of, as CycloneDX 1.5 JSON on stdout: `python tools/sbom.py > sbom.json`.

Names, versions and licences come from the metadata of what is installed, from laconic and its lab downwards, without
extras. Scanners read it offline.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

ROOTS = ("laconic", "laconic-lab")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def normalized(name: str) -> str:
    """A project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(installed: Distribution) -> list[str]:
    """The projects that one needs, without its extras."""
    plain = [text for text in installed.requires or [] if "extra ==" not in text]
    return sorted({normalized(match.group()) for text in plain if (match := _NAME.match(text))})


def sbom(roots: tuple[str, ...] = ROOTS) -> dict[str, Any]:
    """All that is installed of what the roots need, in CycloneDX's terms."""
    installed: dict[str, Distribution] = {}
    waiting = list(roots)
    while waiting:
        name = normalized(waiting.pop())
        try:
            installed[name] = distribution(name)
        except PackageNotFoundError:  # a marker that does not hold here
            continue
        waiting += [other for other in required(installed[name]) if other not in installed]
    purls = {name: f"pkg:pypi/{name}@{each.version}" for name, each in sorted(installed.items())}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "components": [_component(installed[name], name, purl) for name, purl in purls.items()],
        "dependencies": [
            {"ref": purl, "dependsOn": [purls[other] for other in required(installed[name]) if other in purls]}
            for name, purl in purls.items()
        ],
    }


def _component(installed: Distribution, name: str, purl: str) -> dict[str, Any]:
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": installed.version}
    stated = [installed.metadata[key] for key in ("License-Expression", "License") if key in installed.metadata]
    license = next((text.splitlines()[0] for text in stated if text), "")
    if license:
        component["licenses"] = [{"license": {"name": license}}]
    return {**component, "purl": purl}


if __name__ == "__main__":
    print(json.dumps(sbom(), indent=1))
