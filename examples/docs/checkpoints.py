import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic

dist.init_process_group("gloo")
rank = dist.get_rank()


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(256, 10))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    session = laconic.attach(ddp, "topk:rho=0.01")
    return ddp, optimizer, schedule, session


def train(ddp, optimizer, schedule, session, steps):
    for step in steps:
        data = torch.Generator().manual_seed(100 * rank + step)
        x = torch.randn(32, 256, generator=data)
        optimizer.zero_grad()
        ddp(x).logsumexp(1).mean().backward()
        optimizer.step()
        schedule.step()


first = build()
train(*first, range(20))
names = ("model", "optimizer", "schedule", "laconic")
state = {name: part.state_dict() for name, part in zip(names, first)}
torch.save(state, f"rank-{rank}.pt")  # one file for each rank
if rank == 0:
    print(first[-1].stats())
train(*first, range(20, 30))
first[-1].close()

again = build()  # in the process that resumes
state = torch.load(f"rank-{rank}.pt", weights_only=True)
for name, part in zip(names, again):
    part.load_state_dict(state[name])
train(*again, range(20, 30))
assert torch.equal(again[0].module.weight, first[0].module.weight)
again[-1].close()
dist.destroy_process_group()
