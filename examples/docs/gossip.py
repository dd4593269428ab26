import torch
import torch.distributed as dist
from torch import nn

import laconic

dist.init_process_group("gloo")
layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
follower = laconic.follow(model, optimizer, "gossip")

for step in range(20):
    loss = model(torch.randn(32, 256)).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follower.step()

follower.average_()  # one average over the ranks that are alive
if dist.get_rank() == 0:
    print(follower.stats())
follower.close()
dist.destroy_process_group()
