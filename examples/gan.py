"""A GAN under DDP: the generator's pass through the discriminator leaves no trace there.

torchrun --nproc-per-node=2 examples/gan.py [--plain | --careless]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
generator = DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
)
discriminator = DistributedDataParallel(
    nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
)
if "--plain" not in sys.argv:
    sessions = [laconic.attach(model, "topk:rho=0.05") for model in (generator, discriminator)]
steps_of_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
steps_of_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
judge = nn.functional.binary_cross_entropy_with_logits


def real(count: int) -> Tensor:
    """Points of eight blobs on a circle."""
    angle = torch.randint(8, (count,)) * (torch.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


losses = []
for _ in range(400):
    fake = generator(torch.randn(64, 8))
    steps_of_d.zero_grad()
    told = discriminator(torch.cat([real(64), fake.detach()]))
    loss = judge(told, torch.cat([torch.ones(64, 1), torch.zeros(64, 1)]))
    loss.backward()
    steps_of_d.step()
    losses.append(float(loss.detach()))

    steps_of_g.zero_grad()
    if "--careless" in sys.argv:
        judge(discriminator(fake), torch.ones(64, 1)).backward()
    else:
        with discriminator.no_sync():  # its gradients are not wanted: nobody exchanges them
            judge(discriminator(fake), torch.ones(64, 1)).backward()
    steps_of_g.step()

if dist.get_rank() == 0:
    print(f"the discriminator's loss: {sum(losses[-100:]) / 100:.3f}; 0.693 is guessing")
dist.destroy_process_group()
