"""Fabric: attach to what `setup` returns, and save the session with it.

Fabric writes rank 0's file alone; `RankZeroState` puts the states of all
ranks into it. Start it with
`torchrun --nproc-per-node 2 examples/with_fabric.py`.
"""

import os
import tempfile

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import laconic

fabric = Fabric(
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy="ddp",
)
fabric.launch()
x = torch.randn(1280, 64)
loader = fabric.setup_dataloaders(
    DataLoader(
        TensorDataset(x, x[:, :10].argmax(1)), batch_size=32, shuffle=True
    )
)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
model, optimizer = fabric.setup(
    model, torch.optim.SGD(model.parameters(), lr=0.1)
)
session = laconic.attach(model, "topk:rho=0.01")
for inputs, targets in loader:
    optimizer.zero_grad()
    fabric.backward(cross_entropy(model(inputs), targets))
    optimizer.step()
state = {"model": model, "optimizer": optimizer}
state["laconic"] = laconic.RankZeroState(session)
fabric.save(f"{tempfile.gettempdir()}/checkpoint.pt", state)
print(session.stats())  # laconic
