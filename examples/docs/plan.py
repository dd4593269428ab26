import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic

dist.init_process_group("gloo")
layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
ddp = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)


def step():
    optimizer.zero_grad()
    ddp(torch.randn(32, 256)).logsumexp(1).mean().backward()
    optimizer.step()


schemes = ["bf16", "topk:rho=0.01", "local:every=16"]
plan = laconic.plan(ddp, optimizer, step, schemes=schemes)
if dist.get_rank() == 0:
    print(plan)  # rows, reasons, and the line to paste
    print(plan.what_if(workers=16, bits_per_s=10e9).pick)

session = laconic.attach(ddp, "bf16")  # or plan.line
for _ in range(20):
    step()
if dist.get_rank() == 0:
    print(session.stats())
session.close()
dist.destroy_process_group()
