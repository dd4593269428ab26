"""Accelerate: attach to what `prepare` returns.

`accelerator.save_state` then also writes the session's state of every rank,
and `load_state` reads it. Start it with `accelerate launch`, or
`torchrun --nproc-per-node 2 examples/with_accelerate.py`.
"""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from laconic.integrations.accelerate import attach as attach_laconic

x = torch.randn(1280, 64)
loader = DataLoader(
    TensorDataset(x, x[:, :10].argmax(1)), batch_size=32, shuffle=True
)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accelerator = Accelerator(cpu=not torch.cuda.is_available())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
session = attach_laconic(accelerator, model, "topk:rho=0.01")
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward(cross_entropy(model(inputs), targets))
    optimizer.step()
accelerator.save_state(f"{tempfile.gettempdir()}/checkpoint")
print(session.stats())  # laconic
accelerator.end_training()
