"""Plain PyTorch: one line after the model is wrapped.

Start it with `torchrun --nproc-per-node 2 examples/with_ddp.py`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laconic

dist.init_process_group()
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
)
session = laconic.attach(model, "topk:rho=0.01")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    x = torch.randn(32, 64)
    loss = cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(session.stats())
