import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic

dist.init_process_group("gloo")
scheme, servers = "overlap:rho=0.01", [0]
if dist.get_rank() in servers:
    laconic.serve(scheme, servers=servers)  # returns when the workers are done
else:
    workers = dist.new_group(
        [r for r in range(dist.get_world_size()) if r not in servers], use_local_synchronization=True
    )
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    ddp = DistributedDataParallel(model, process_group=workers)
    ddp.broadcast_buffers = False  # which DDP would do among workers, at every step
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
