import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic

dist.init_process_group("gloo")
layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
ddp = DistributedDataParallel(nn.Sequential(*layers))
session = laconic.attach(ddp, "topk:rho=0.01")  # the added line

optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(20):
    loss = ddp(torch.randn(32, 256)).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

if dist.get_rank() == 0:
    print(session.stats())  # bytes sent, ratio to dense, time by stage
session.close()
dist.destroy_process_group()
