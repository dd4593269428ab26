"""plan(model, optimizer, step): what would pay on this model and network, measured and said beforehand."""

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.adapters.alike import check_common
from laconic.adapters.switch import check_free, unwrapped
from laconic.errors import SchemeError
from laconic.layout import plain_name
from laconic.planning.answer import Plan, answer
from laconic.planning.candidates import CANDIDATES, candidate, optimizer_name
from laconic.planning.own_steps import OwnSteps, busy
from laconic.planning.pairs import measure_pairs
from laconic.planning.rehearsals import measure_exchanges
from laconic.transport import Group, ProcessGroup, naming_lost_peers, own_group, world

_REHEARSING_S = 35.0  # after which exchanges are rehearsed as seldom as can be
_PLANNING_S = 45.0  # after which no more is tried


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], object],
    *,
    schemes: Sequence[str] = (),
    steps: int = 1000,
    group: ProcessGroup | None = None,
) -> Plan:
    """Measure a training step, the network and what exchanges cost, and rank schemes by time to accuracy.

    A call that all ranks make. `step()` is one training step: forward, backward, optimizer.step(), zero_grad(). `model`
    is what it trains, best as the DistributedDataParallel of the script: then it is known how much of the backward pass
    hides an exchange. Weights, optimizer, buffers and generators are afterwards as before. Without `schemes`, texts as
    attach() and follow() take them, the usual ones are compared, by the time to where bf16 is after `steps` steps.
    """
    start = time.perf_counter()
    candidates = [candidate(text) for text in schemes or CANDIDATES]
    model = unwrapped(model)
    bare = model
    if isinstance(model, DistributedDataParallel):
        check_free(model)  # before anyone waits
        bare = model.module
    if group is None:
        group = model.process_group if isinstance(model, DistributedDataParallel) else world()
    trained = {plain_name(name): p for name, p in bare.named_parameters() if p.requires_grad}
    if not trained:
        raise SchemeError("the model has no parameter that is trained; plan for one that has")
    device = next(iter(trained.values())).device
    check_common(bare, "plan " + ", ".join(map(str, candidates)), group, device)
    own = own_group(group, device)
    transport = Group(own, device)
    try:
        with _as_before(bare, optimizer):
            own_steps = OwnSteps(model, optimizer, step, trained, transport)
            compute, gradients = own_steps.measure()
            measured = measure_exchanges(
                candidates,
                gradients,
                bare,
                optimizer_name(optimizer),
                compute,
                transport,
                group,
                busy=lambda: busy(device),
                until=start + _REHEARSING_S,
            )
            with naming_lost_peers(group.rank()):
                measured = replace(measured, pairs=measure_pairs(own))
            foretold = answer(measured, steps=steps)
            tried = own_steps.try_all(foretold, start + _PLANNING_S)
    finally:
        transport.close()
    measured = replace(measured, tried_s=tuple(tried.items()))
    return answer(measured, steps=steps, seconds=time.perf_counter() - start)


@contextmanager
def _as_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Afterwards give back weights, buffers, gradients, the optimizer's state and all generators as they were."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    kept = copy.deepcopy(optimizer.state_dict())
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    of_torch = torch.get_rng_state()
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
        optimizer.load_state_dict(kept)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)
