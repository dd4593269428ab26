import torch
import torch.distributed as dist
from torch import nn

import laconic

dist.init_process_group("gloo")  # added
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
model = nn.Sequential(
    nn.Embedding(96, 64),
    nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
    nn.Linear(64, 96),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheme = "streaming:every=8,fragments=4,delay=2"
follower = laconic.follow(model, optimizer, scheme)  # added

# Changed: every worker draws data of its own.
data = torch.Generator().manual_seed(1 + dist.get_rank())
for step in range(20):
    tokens = torch.randint(96, (8, 33), generator=data)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten()
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follower.step()  # added

follower.average_()  # added: all ranks end with the same model
if dist.get_rank() == 0:
    print(follower.stats())
follower.close()
dist.destroy_process_group()
