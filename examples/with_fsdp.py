"""FSDP2 shards inside a node; between nodes laconic keeps replicas together.

Start it on two nodes, or on one machine that stands for both, with
`torchrun --nproc-per-node 4 examples/with_fsdp.py`.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import laconic

dist.init_process_group()
mesh = init_device_mesh(
    "cpu",
    (2, dist.get_world_size() // 2),
    mesh_dim_names=("replicate", "shard"),
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
for layer in model:
    fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
follower = laconic.follow(
    model, optimizer, "streaming", group=mesh.get_group("replicate")
)
torch.manual_seed(dist.get_rank())
for _ in range(20):
    x = torch.randn(32, 64)
    loss = cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follower.step()  # laconic
follower.average_()  # laconic: replicas differ until they are averaged
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optimizer": optimizer_state}
state["laconic"] = laconic.PerRankState(follower)
dcp.save(state, checkpoint_id=f"{tempfile.gettempdir()}/with-fsdp")
print(follower.stats())  # laconic
