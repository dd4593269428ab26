"""Refuse names that say nothing of what they hold: pronouns and bare participles, wherever a name is bound.

python tools/check_names.py src lab/src
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

BANNED = frozenset({"asked", "found", "heard", "mine", "said", "there", "told", "way"})
PUBLIC = {("follower.py", "asked")}  # a field of FollowerStats, which scripts read


def banned_names(path: Path) -> Iterator[str]:
    """Where a file binds one: `path:line: name`."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = ""
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        if name.strip("_").lower() in BANNED and (path.name, name) not in PUBLIC:
            yield f"{path}:{node.lineno}: {name}"  # type: ignore[attr-defined]


def main(roots: list[str]) -> int:
    """Print all of them; 1 where there is any."""
    lines = [line for root in roots for path in sorted(Path(root).rglob("*.py")) for line in banned_names(path)]
    print("\n".join(lines) or "no banned names")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
