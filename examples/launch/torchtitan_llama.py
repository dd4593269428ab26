"""torchtitan: its own function shards inside a node; laconic sends between.

Its trainer needs GPUs. This is what it does with a `ModelSpec` whose
`parallelize_fn` shards over the node's axis alone, and whose
`post_optimizer_build_fn` attaches, on CPUs; torchtitan sums gradients, and so
does laconic then. Tried with torchtitan 0.3, by
`torchrun --nproc-per-node 4 examples/launch/torchtitan_llama.py`.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

import laconic

torch._utils._get_available_device_type = lambda: (
    "cpu"
)  # before torchtitan asks

from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402


def parallelize(model, parallel_dims):
    """Shard it."""
    apply_fsdp_to_decoder(
        model,
        parallel_dims.get_mesh("fsdp"),
        torch.float32,
        torch.float32,
        pp_enabled=False,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(
                True
            )  # Gloo cannot multiply on the way
    return model


def attach(optimizers, model_parts, parallel_dims):
    """Let it exchange; one session for each part."""
    group = parallel_dims.get_mesh("dp_replicate").get_group()
    return [
        laconic.attach(part, "topk:rho=0.01", group=group)
        for part in model_parts
    ]


dist.init_process_group("gloo")
dims = ParallelDims(
    dp_replicate=2,
    dp_shard=2,
    cp=1,
    tp=1,
    pp=1,
    ep=1,
    world_size=4,
    spmd_backend="partial_dtensor",
)
dims.build_mesh()
config = model_registry("debugmodel").model
for layer in config.layers:
    layer.attention.inner_attention = (
        ScaledDotProductAttention.Config()
    )  # the others have no backward pass on CPUs
with torch.device("meta"):
    model = config.build()
model = parallelize(model, dims)
model.to_empty(device="cpu")
with torch.no_grad():
    model.init_weights(buffer_device=None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
[session] = attach([optimizer], [model], dims)
torch.manual_seed(dist.get_rank())
tokens = torch.randint(2048, (2, 65))
num_tokens = dist.get_world_size() * 2 * 64
for _ in range(10):
    logits = model(tokens[:, :-1])
    loss = (
        cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        / num_tokens
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(session.stats())
