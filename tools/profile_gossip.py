"""Where the time of an exchange of remainders goes, both ends in one process: python tools/profile_gossip.py 85e6 cuda.

Medians in ms, and over that of a copy of the model where it lies. A turn of one worker is one half asked about, the
other half answered, and what is owed applied.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from laconic.quantize import ModuloCode
from laconic.replicas.messages import check_finite
from laconic.replicas.modulo_messages import ModuloMessages
from laconic.replicas.pending import PendingUpdate
from laconic.replicas.vector import ModelVector

T = TypeVar("T")
_WIDTH = 768  # of a layer: four times its square are the entries of one matrix


def profile(num_entries: int, device: str, rounds: int) -> dict[str, float]:
    """The median of each stage in ms, by name."""
    took: dict[str, list[float]] = defaultdict(list)

    def timed(stage: str, work: Callable[..., T], *given: Any) -> T:
        _wait_for(device)
        start = time.perf_counter()
        made = work(*given)
        _wait_for(device)
        took[stage].append(1e3 * (time.perf_counter() - start))
        return made

    torch.manual_seed(0)
    num_layers = max(2, num_entries // (4 * _WIDTH**2))
    layers = [nn.Parameter(0.02 * torch.randn(4 * _WIDTH**2, device=device)) for _ in range(num_layers)]
    models = [nn.ParameterList(layers), copy.deepcopy(nn.ParameterList(layers))]
    here, there = vectors = [ModelVector(model, "half") for model in models]
    asker, answerer = (ModuloMessages(vector, ModuloCode(), 0, rank) for rank, vector in enumerate(vectors))
    owed, owed_there = PendingUpdate(here), PendingUpdate(there)
    source, target = here.read(), here.read()
    for _ in range(rounds):
        with torch.no_grad():
            for parameter in [*models[0].parameters(), *models[1].parameters()]:
                parameter.add_(torch.randn_like(parameter), alpha=3e-4)
        timed("copy", target.copy_, source)
        for k in range(len(here.groups)):
            about = asker.subset([k])
            values = timed("read to ask", about.read, owed)
            timed("finite", check_finite, values)
            request = timed("ask", asker.request_, about, values)
            message = timed("request to the host", request.message.cpu)
            message = timed("and back", message.to, device)
            topic, told = timed("open", answerer.open, message, 0)
            theirs = timed("read to answer", topic.read, owed_there)
            answer, back = timed("reply", answerer.reply_, topic, told, theirs)
            assert back is not None
            owed_there.add_(topic, back)
            reply = timed("answer to the host", answer.cpu)
            reply = timed("and back again", reply.to, device)
            way = timed("settle", asker.finish_, request, reply, 1)
            assert torch.equal(way, -back)
            timed("owe", owed.add_, about, way)
        timed("apply", here.move_, owed.whole, sorted(owed.groups))
        there.move_(owed_there.whole, sorted(owed_there.groups))
        owed.groups, owed_there.groups = set(), set()
    return {stage: statistics.median(times) for stage, times in took.items()}


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    stages = profile(int(float(sys.argv[1])), sys.argv[2], 7)
    for stage, ms in stages.items():
        print(f"{stage:22}{ms:9.2f} ms{ms / stages['copy']:8.2f} copies")
    turn = sum(ms for stage, ms in stages.items() if stage != "copy") + stages["owe"] + stages["finite"]
    print(f"{'a turn of one worker':22}{turn:9.2f} ms{turn / stages['copy']:8.2f} copies")
