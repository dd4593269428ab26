"""A framework's buckets become buckets of a session: DDP's, FSDP2's, those of whoever registers a hook."""

from laconic.adapters.ddp import (
    DdpAdapter,
    GradScaler,
    SessionOptions,
    attach_to_ddp,
    check_options,
    of_gradients,
    ready,
)
from laconic.adapters.follow import follow_others, gossip_among
from laconic.adapters.fsdp import attach_to_shards
from laconic.adapters.hook import HookSession, hook
from laconic.adapters.torch_hooks import HookSwitch, check_free, unwrapped
