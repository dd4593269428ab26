import torch
import torch.distributed as dist
from torch import nn

import laconic

dist.init_process_group("gloo")
layers = nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
model = nn.Sequential(*layers)  # not wrapped in DDP
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheme = "streaming:every=8,fragments=2,delay=2"
follower = laconic.follow(model, optimizer, scheme)

for step in range(20):
    loss = model(torch.randn(32, 256)).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follower.step()  # after each optimizer.step(), on all ranks

follower.average_()  # all ranks end with the same model
if dist.get_rank() == 0:
    print(follower.stats())  # bytes, rounds, time that training waited
follower.close()
dist.destroy_process_group()
