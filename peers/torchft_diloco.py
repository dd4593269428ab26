"""torchft's DiLoCo on laconic's job: the mean drift of all models is a gradient to an outer Nesterov step, in fp32.

    laconic lab run --hosts 4 --link 20mbit -- python peers/torchft_diloco.py --task chars --model gpt-tiny ...

Every host is a replica group of its own; the lighthouse runs on host 0. With --fragments and --delay it is Streaming
DiLoCo: fragments take turns, and what came of one is applied so many steps after it was sent.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from same_job import leave, parser, train, worker_of

_LIGHTHOUSE_PORT = 29510
_STORE_PORT = 29511
_TIMEOUT = timedelta(seconds=120)


def main() -> None:
    """Be one host."""
    options = parser(__doc__)
    options.add_argument("--fragments", type=int, default=1, help="of the model, that take turns (default 1)")
    options.add_argument("--delay", type=int, default=0, help="steps in the background, below every/fragments")
    options.add_argument("--keep", type=float, default=0.0, help="what of itself a late fragment keeps (torchft: 0)")
    options.add_argument("--outer-lr", type=float, default=0.7)
    options.add_argument("--outer-momentum", type=float, default=0.9)
    asked = options.parse_args()
    logging.disable(logging.INFO)
    worker = worker_of(asked)
    dist.init_process_group("gloo")
    host = f"host{worker.rank}"
    everyone = worker.course.num_workers
    if worker.rank == 0:
        lighthouse = LighthouseServer(f"[::]:{_LIGHTHOUSE_PORT}", everyone)  # noqa: F841, it lives while it is held
    dist.barrier()
    store = dist.TCPStore(host, _STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=worker.model.load_state_dict,
        state_dict=worker.model.state_dict,
        min_replica_size=everyone,
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://host0:{_LIGHTHOUSE_PORT}",
        replica_id=host,
        hostname=host,
        init_sync=False,  # all models are drawn from one seed
    )
    fragments = fragments_of(worker.model, asked.fragments)
    # One for each: torchft steps it while the other fragments' gradients are those of the last batch.
    outer = [
        torch.optim.SGD(f.parameters(), lr=asked.outer_lr, momentum=asked.outer_momentum, nesterov=True)
        for f in fragments
    ]
    with DiLoCo(
        manager,
        fragments,
        worker.updater.optimizer,
        outer,
        sync_every=asked.every,
        fragment_sync_delay=asked.delay,
        fragment_update_alpha=asked.keep,
    ):
        train(worker, worker.model, nullcontext)  # the optimizer's own hooks do it
    leave()


def fragments_of(model: nn.Module, count: int) -> list[nn.Module]:
    """The model's layers in so many runs of about equal size; a layer that shares its weights is in the first alone."""
    seen: set[nn.Parameter] = set()
    runs: list[list[nn.Module]] = [[] for _ in range(count)]
    total = sum(p.numel() for p in model.parameters())
    done = 0
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p not in seen]
        if not own:
            continue
        seen.update(own)
        size = sum(p.numel() for p in own)
        runs[int(count * (done + size / 2) / total)].append(module)
        done += size
    return [nn.ModuleList(run) for run in runs]


if __name__ == "__main__":
    main()
