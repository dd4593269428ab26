"""A session's state in a checkpoint: plain tensors, numbers and texts, which weights_only loading takes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.errors import StateError
from laconic.exchange import piece_borders
from laconic.layout import Layout
from laconic.scheme import Scheme
from laconic.server.client import ServerClient
from laconic.transport import Transport

_FORMAT = 1

Kept = dict[str, dict[str, Tensor]]
Saved = Mapping[str, Any] | Sequence[Mapping[str, Any]]  # one worker's state, or those of all


def save(
    scheme: Scheme,
    transport: Transport,
    step: int,
    skipped_steps: int,
    layouts: Sequence[Layout],
    kept: Kept,
    *,
    past: Kept,
    owner: Mapping[str, Any],
) -> dict[str, Any]:
    """One worker's state."""
    return {
        "format": _FORMAT,
        "scheme": str(scheme),
        "step": step,
        "skipped_steps": skipped_steps,
        "rank": transport.rank,
        "num_workers": transport.num_workers,
        "num_living": transport.num_living if isinstance(transport, ServerClient) else transport.num_workers,
        "buckets": [{span.name: span.num_entries for span in layout.spans} for layout in layouts],
        "memory": kept,
        "past": past,
        "owner": owner,
    }


def load(saved: Saved, scheme: Scheme, transport: Transport) -> tuple[int, int, list[Layout], Kept]:
    """(steps, skipped steps, layouts of the last step, kept tensors) for this worker.

    What a worker kept that died before the save is gone with it: whoever takes its place starts with nothing.
    """
    states = _by_rank(saved)
    _check(states, scheme)
    num_saved = int(states[0]["num_workers"])
    num_there = int(states[0].get("num_living", num_saved))
    are_all = len({s["rank"] for s in states}) == num_there
    mine = [s for s in states if s["rank"] % transport.num_workers == transport.rank]
    if num_saved == transport.num_workers:
        if not mine and not are_all:
            raise StateError(f"no state of rank {transport.rank} is among those given; load what this rank saved")
    else:
        if not are_all:
            raise StateError(
                f"the state is of one of {num_saved} workers, now there are {transport.num_workers}; "
                f"give load_state_dict a list of all {num_there} states"
            )
        if transport.rank == 0 and scheme.memory.kinds:
            warnings.warn(
                f"what {num_saved} workers kept now lies with {transport.num_workers}; "
                "the sum over workers is unchanged",
                stacklevel=4,
            )
    layouts = [Layout.of(list(bucket), list(bucket.values())) for bucket in states[0]["buckets"]]
    return int(states[0]["step"]), int(states[0]["skipped_steps"]), layouts, _sum([s["memory"] for s in mine])


def load_past(saved: Saved, transport: Transport) -> Kept:
    """What the workers remember of the answers, which is the same on all of them."""
    states = _by_rank(saved)
    by_rank = {int(one["rank"]): one["past"] for one in states}
    return dict(by_rank.get(transport.rank) or states[transport.rank % len(states)]["past"])


def load_owner(saved: Saved, transport: Transport) -> dict[str, Any]:
    """What this worker holds as an owner: what it held, or its piece of what all held where their number changed."""
    states = _by_rank(saved)
    owners = [one["owner"] for one in states if one["owner"]]
    share, num_shares = transport.owned_share, transport.num_shares
    assert share is not None
    if not owners and not any(one.get("servers") for one in states):
        return {"held": {}, "records": {}}
    if not owners:
        raise StateError("the state was saved under dedicated servers; resume with as many")
    if owners[0]["num_shares"] == num_shares:
        mine = [one["owner"] for one in states if one["rank"] == share]
        return dict(mine[0]) if mine else {"held": {}, "records": {}}
    return {"held": recut([one["held"] for one in owners], share, num_shares), "records": {}}


def recut(held: Sequence[Mapping[str, Tensor]], share: int, num_shares: int) -> dict[str, Tensor]:
    """One share's piece of each parameter, from the pieces of all shares of another division."""
    pieces = {}
    for name in held[0]:
        whole = torch.cat([one[name] for one in held])
        borders = piece_borders(whole.numel(), num_shares)
        pieces[name] = whole[borders[share] : borders[share + 1]].clone()
    return pieces


def _by_rank(saved: Saved) -> list[Mapping[str, Any]]:
    return [saved] if isinstance(saved, Mapping) else sorted(saved, key=lambda state: int(state["rank"]))


def _check(states: Sequence[Mapping[str, Any]], scheme: Scheme) -> None:
    for found in states:
        if found.get("format") != _FORMAT:
            raise StateError(f"the state's format is {found.get('format')}, this version reads {_FORMAT}")
        kinds = tuple(found["memory"])
        if kinds != scheme.memory.kinds:
            raise StateError(
                f"the state was saved under {found['scheme']} and keeps {', '.join(kinds) or 'nothing'}; "
                f"{scheme} keeps {', '.join(scheme.memory.kinds) or 'nothing'}; resume under the scheme that saved it"
            )
    if len({(found["step"], found["num_workers"]) for found in states}) > 1:
        raise StateError("the states are of different steps; load states that were saved together")


def _sum(kept: Sequence[Kept]) -> Kept:
    total: Kept = {}
    for one in kept:
        for kind, tensors in one.items():
            into = total.setdefault(kind, {})
            for name, tensor in tensors.items():
                into[name] = into[name] + tensor if name in into else tensor
    return total
