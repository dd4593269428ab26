from __future__ import annotations

from tests.workers import CONTEXT

# Before any process is forked: importing these takes a process ten seconds.
CONTEXT.set_forkserver_preload(
    ["laconic", "torch._dynamo", "accelerate", "transformers.trainer", "lightning.pytorch", "lightning.fabric"]
)
