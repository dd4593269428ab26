"""torchft: replica groups of its quorum exchange 4-bit drifts, not gradients.

Start a lighthouse and three replica groups; kill one with `kill -9`, and start
it again: it continues from the others' anchors, and all print one digest.

    torchft_lighthouse --min_replicas 2 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    for i in 1 2 3; do python examples/with_torchft.py & done; wait %2 %3 %4

One round is one of torchft's steps. A round that fails costs nothing: its
drifts go with the next. Who missed a round, or is new, is healed with anchors
and outer momentum, 8 bytes a parameter, within `timeout`; a new process
begins with an empty inner optimizer. The lighthouse takes 5 s to see a death;
a round with a group that is stopped hangs for the process group's timeout.
Who comes back when the others have ended waits for a quorum, and fails.
"""

import hashlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torchft import Manager, ProcessGroupGloo

from laconic.integrations.torchft import follow

ROUNDS = 3000  # of torchft, each of one fragment
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
pg = ProcessGroupGloo(timeout=timedelta(seconds=20))  # drifts leave the host
manager = Manager(
    pg=pg,
    load_state_dict=None,  # the follower registers what heals
    state_dict=None,
    min_replica_size=2,
    use_async_quorum=False,  # rounds begin from equal anchors
    timeout=timedelta(seconds=60),
    quorum_timeout=timedelta(seconds=60),  # of pg, twice or more
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
    hostname="localhost",
)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheme = "streaming:every=8,fragments=2,delay=2"  # laconic's
follower = follow(manager, pg, model, optimizer, scheme)  # laconic
while manager.current_step() < ROUNDS:
    x = torch.randn(32, 64)
    loss = cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follower.step(tokens=len(x))  # laconic
    stats = follower.stats()  # laconic
    if stats.steps % 400 == 0:
        print(f"{os.getpid()} at {manager.current_step()}: loss {loss:.3f}")
follower.write_anchor_()  # laconic: drop what only this group has learned
vector = nn.utils.parameters_to_vector(model.parameters()).detach()
digest = hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:12]
print(f"{os.getpid()} ends with {digest}, loss {loss:.3f}: {stats}")
manager.shutdown(wait=False)
