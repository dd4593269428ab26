"""DDP takes one communication hook for good; this one passes buckets on to whoever listens at the time."""

# No deferred annotations here: DDP checks those of its hook.

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import SchemeError

_WRAPPED = ("_orig_mod", "_forward_module")  # by torch.compile; by Fabric

BucketHook = Callable[[GradBucket], Future[Tensor]]


class HookSwitch:
    """The hook of a DDP module; while nobody listens, gradients are averaged as DDP itself does."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._group = ddp.process_group
        self.listener: BucketHook | None = None
        ddp.register_comm_hook(self, HookSwitch.submit)

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> "HookSwitch":
        """The module's own; SchemeError where another hook, or another session, has it."""
        for _, state in ddp._comm_hooks:
            if isinstance(state, cls) and state.listener is None:
                return state
        check_free(ddp)
        return cls(ddp)

    def submit(self, bucket: GradBucket) -> Future[Tensor]:
        """Hand one of DDP's buckets on."""
        return self.listener(bucket) if self.listener is not None else allreduce_hook(self._group, bucket)

    def release(self) -> None:
        """Listen no more: from the next backward pass on DDP averages by itself."""
        self.listener = None


def check_free(ddp: DistributedDataParallel) -> None:
    """SchemeError unless nobody listens to the module's gradients yet."""
    if any(not isinstance(state, HookSwitch) or state.listener is not None for _, state in ddp._comm_hooks):
        raise SchemeError(
            "this module has a communication hook already; close() the session that has it, or attach to a fresh "
            "DistributedDataParallel"
        )


def kept_as_they_are(bucket: GradBucket) -> Future[Tensor]:
    """A listener that exchanges nothing."""
    buffer = bucket.buffer()
    done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside what torch.compile, Accelerate and Fabric hand out, by the names of their fields."""
    for name in _WRAPPED:
        inside = vars(module).get("_modules", {}).get(name)
        if isinstance(inside, nn.Module):
            return unwrapped(inside)
    return module
