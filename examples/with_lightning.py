"""Lightning: give the trainer a `LaconicStrategy`.

It also works on CPU, where Lightning ignores `DDPStrategy(ddp_comm_hook=...)`
without a warning. Checkpoints hold the states of all ranks, and
`Trainer.fit(..., ckpt_path=...)` resumes from them. Start it with
`torchrun --nproc-per-node 2 examples/with_lightning.py`.
"""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from laconic.integrations.lightning import LaconicStrategy


class Classifier(LightningModule):
    """A few layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def training_step(self, batch, _):
        """The loss of one batch."""
        inputs, targets = batch
        return cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self):
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


x = torch.randn(1280, 64)
loader = DataLoader(
    TensorDataset(x, x[:, :10].argmax(1)), batch_size=32, shuffle=True
)
trainer = Trainer(
    max_epochs=1,
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy=LaconicStrategy("topk:rho=0.01"),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), loader)
print(trainer.strategy.session.stats())  # laconic
