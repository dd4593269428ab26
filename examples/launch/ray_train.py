"""Ray Train: attach to the DDP model that `prepare_model` returns."""

import ray.train
import ray.train.torch
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn.functional import cross_entropy

import laconic


def train() -> None:
    """What each worker runs."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = ray.train.torch.prepare_model(model)
    session = laconic.attach(model, "topk:rho=0.01")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        x = torch.randn(32, 64)
        loss = cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(session.stats())


TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
