"""Every example in a docstring of a public name runs."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.recipes import RECIPES
from laconic.scheme import PARTS

PARTS_BY_NAME = {part.__name__: part for answers in PARTS.values() for part in answers.values()}
PUBLIC = {name: value for name in laconic.__all__ if callable(value := getattr(laconic, name))}
DOCUMENTED = {**PARTS_BY_NAME, **PUBLIC, **{f"recipe {name}": recipe for name, recipe in RECIPES.items()}}
NEEDS_ONE = {
    *(name for name, part in PARTS_BY_NAME.items() if inspect.signature(part).parameters),
    "attach",
    "follow",
    "join",
    "parse",
    *(name for name in DOCUMENTED if name.startswith("recipe")),
}
OTHERS_ROOMS = {part.__name__ for part in (*PARTS["trigger"].values(), *PARTS["outer"].values())} | {"Overlap"}


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """What an example finds: laconic, torch, the parts, and one rank with a model that trains."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {name: part for name, part in PARTS_BY_NAME.items() if inspect.isclass(part)}
    yield {
        "laconic": laconic,
        "MemberServer": laconic.MemberServer,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        **parts,
    } | {"DistributedDataParallel": DistributedDataParallel}
    dist.destroy_process_group()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_run(name: str, names: dict[str, Any]) -> None:
    found = doctest.DocTestParser().get_doctest(inspect.getdoc(DOCUMENTED[name]) or "", dict(names), name, None, None)
    assert found.examples or name not in NEEDS_ONE - OTHERS_ROOMS, f"{name} has no example"
    report: list[str] = []
    doctest.DocTestRunner().run(found, out=report.append)
    assert not report, "".join(report)
    for made in found.globs.values():
        if hasattr(made, "close") and made is not torch:
            made.close()
