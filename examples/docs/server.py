import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic

dist.init_process_group("gloo")
scheme, servers = "overlap:rho=0.01", [0]
if dist.get_rank() in servers:
    laconic.serve(scheme, servers=servers)  # until the workers are done
else:
    workers = dist.new_group(
        range(1, dist.get_world_size()), use_local_synchronization=True
    )
    layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    ddp = DistributedDataParallel(
        nn.Sequential(*layers), process_group=workers
    )
    ddp.broadcast_buffers = False  # would end with the first dead worker
    session = laconic.attach(ddp, scheme, servers=servers)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        ddp(torch.randn(32, 256)).logsumexp(1).mean().backward()
        optimizer.step()
    if dist.get_rank(workers) == 0:
        print(session.stats())
    session.close()
dist.destroy_process_group()
