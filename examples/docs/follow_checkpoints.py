import torch
import torch.distributed as dist
from torch import nn

import laconic

dist.init_process_group("gloo")
rank = dist.get_rank()


def build():
    torch.manual_seed(0)
    model = nn.Linear(256, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheme = "streaming:every=4,fragments=2,delay=1"
    return model, optimizer, laconic.follow(model, optimizer, scheme)


def train(model, optimizer, follower, steps):
    for step in steps:
        data = torch.Generator().manual_seed(100 * rank + step)
        x = torch.randn(32, 256, generator=data)
        optimizer.zero_grad()
        model(x).logsumexp(1).mean().backward()
        optimizer.step()
        follower.step()


first = build()
train(*first, range(20))
names = ("model", "optimizer", "laconic")
state = {name: part.state_dict() for name, part in zip(names, first)}
torch.save(state, f"rank-{rank}.pt")  # models differ: every rank saves
if rank == 0:
    print(first[-1].stats())
train(*first, range(20, 30))
first[-1].close()

again = build()  # in the process that resumes
state = torch.load(f"rank-{rank}.pt", weights_only=True)
for name, part in zip(names, again):
    part.load_state_dict(state[name])
train(*again, range(20, 30))
assert torch.equal(again[0].weight, first[0].weight)
again[-1].close()
dist.destroy_process_group()
