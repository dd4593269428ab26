"""A GAN under DDP: two models, two optimizers, two sessions.

The generator's pass through the discriminator must leave nothing there.

torchrun --nproc-per-node=2 examples/gan.py [--plain | --careless]
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic


def network(inputs: int, outputs: int) -> DistributedDataParallel:
    """Two hidden layers."""
    hidden = nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
    layers = nn.Sequential(*hidden, nn.Linear(128, outputs))
    return DistributedDataParallel(layers)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
generator, discriminator = network(8, 2), network(2, 1)
if "--plain" not in sys.argv:
    models = generator, discriminator
    sessions = [laconic.attach(model, "topk:rho=0.05") for model in models]
adam = {"lr": 1e-3, "betas": (0.5, 0.9)}
steps_of_g = torch.optim.Adam(generator.parameters(), **adam)
steps_of_d = torch.optim.Adam(discriminator.parameters(), **adam)
judge = nn.functional.binary_cross_entropy_with_logits


def real(count: int) -> Tensor:
    """Points of eight blobs on a circle."""
    angle = torch.randint(8, (count,)) * (torch.pi / 4)
    points = torch.stack([angle.cos(), angle.sin()], 1)
    return points + 0.05 * torch.randn(count, 2)


losses = []
for _ in range(400):
    fake = generator(torch.randn(64, 8))
    steps_of_d.zero_grad()
    logits = discriminator(torch.cat([real(64), fake.detach()]))
    labels = torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])
    loss = judge(logits, labels)
    loss.backward()
    steps_of_d.step()
    losses.append(float(loss.detach()))

    steps_of_g.zero_grad()
    # The discriminator's gradients of this pass are not wanted.
    careless = "--careless" in sys.argv
    with nullcontext() if careless else discriminator.no_sync():
        judge(discriminator(fake), torch.ones(64, 1)).backward()
    steps_of_g.step()

if dist.get_rank() == 0:
    mean = sum(losses[-100:]) / 100
    print(f"the discriminator's loss: {mean:.3f}; 0.693 is guessing")
dist.destroy_process_group()
