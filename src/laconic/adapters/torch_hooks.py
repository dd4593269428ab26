"""DDP's communication hooks: the one that we register for good, and PyTorch's own as controls, with bytes counted."""

# No deferred annotations here: DDP checks those of its hook.

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic import kernels
from laconic.errors import SchemeError, StateError
from laconic.paths import PHASES
from laconic.scheme import TorchHook
from laconic.session import Attached, Stats, metrics_of, step_ends
from laconic.transport import CountedGroup, Everyone, backend_for, ring_bytes

_WRAPPED = ("_orig_mod", "_forward_module")  # by torch.compile; by Fabric

BucketHook = Callable[[GradBucket], Future[Tensor]]


class HookSwitch:
    """The hook of a DDP module, which takes one for good: it passes buckets on to whoever listens at the time.

    While nobody listens, gradients are averaged as DDP itself does.
    """

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
        return self.listener(bucket) if self.listener is not None else default_hooks.allreduce_hook(self._group, bucket)

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


class TorchHookSession(Attached):
    """The face of a session over a hook that lives in PyTorch; its time is all booked as exchange."""

    transport: None = None
    error: BaseException | None = None  # what goes wrong there is raised in the backward pass

    def __init__(self, ddp: DistributedDataParallel, scheme: TorchHook, group: ProcessGroup) -> None:
        self.scheme = scheme
        self.everyone = Everyone(ddp.process_group)
        self._group = CountedGroup(group)
        self._num_entries = 0
        self._steps = 0
        self._seconds = 0.0  # during which at least one bucket was under way
        self._last_end = 0.0
        self._received: list[Tensor] = []  # in this step
        self._step_is_whole = True
        self._step_ends = step_ends()
        self._lock = threading.Lock()
        self._power = self._power_state(ddp, group) if scheme.hook == "powersgd" else None
        self._switch = HookSwitch.of(ddp)
        self._switch.listener = self.run

    def _power_state(self, ddp: DistributedDataParallel, group: ProcessGroup) -> powerSGD_hook.PowerSGDState:
        trained = [p for p in ddp.parameters() if p.requires_grad]
        num_bytes = sum(p.numel() * p.element_size() for p in trained)
        one_bucket = not ddp.bucket_bytes_cap_default and ddp.bucket_bytes_cap >= num_bytes
        if backend_for(group, trained[0].device) == "gloo" and not one_bucket:
            raise SchemeError(
                "PyTorch's PowerSGD aborts over Gloo with more than one bucket; "
                f"build DistributedDataParallel(model, bucket_cap_mb={num_bytes // 2**20 + 1})"
            )
        return powerSGD_hook.PowerSGDState(
            self._group, matrix_approximation_rank=self.scheme.rank, start_powerSGD_iter=self.scheme.start
        )

    def run(self, bucket: GradBucket) -> Future[Tensor]:
        if self._step_is_whole:
            self._received = []
            self._step_ends.append(self._totals())
        self._num_entries += bucket.buffer().numel()
        self._steps += bucket.is_last()
        self._step_is_whole = bucket.is_last()
        since = time.perf_counter()
        if self._power is not None:
            result = powerSGD_hook.powerSGD_hook(self._power, bucket)
        else:
            result = default_hooks.fp16_compress_hook(self._group, bucket)
        return result.then(partial(self._end, since))

    def _end(self, since: float, done: Future[Tensor]) -> Tensor:
        value = done.value()
        with self._lock:
            now = time.perf_counter()
            self._seconds += now - max(since, self._last_end)
            self._last_end = now
            self._received.append(value)
        return value

    @property
    def last_step_finite(self) -> bool:
        return all(map(kernels.all_finite, self._received))

    def check_replicas_(self) -> None:
        """Nothing: what PyTorch's hook makes of gradients is PyTorch's."""

    def stats(self, *, ages: bool = False) -> Stats:
        traffic = self._group.traffic
        num_workers = self._group.size()
        return Stats(
            scheme=str(self.scheme),
            kernels="torch",
            num_workers=num_workers,
            steps=self._steps,
            skipped_steps=0,
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
            dense_bytes_out=ring_bytes(4 * self._num_entries, num_workers),
            by_kind=traffic.copy(),
            seconds={**dict.fromkeys(PHASES, 0.0), "exchange": self._seconds},
        )

    def metrics(self, *, norms: bool = False) -> dict[str, float]:
        return metrics_of(self._step_ends, self._totals(), step=self._steps, members=self._group.size())

    def _totals(self) -> dict[str, float]:
        stats = self.stats()
        return {name: getattr(stats, name) for name in ("bytes_out", "bytes_in", "dense_bytes_out")} | {
            "exchange_ms": 1e3 * self._seconds
        }

    def state_dict(self) -> dict[str, Any]:
        power = self._power
        if power is None:
            return {"scheme": str(self.scheme)}
        drawn: Any = power.rng.get_state()
        return {
            "scheme": str(self.scheme),
            "iter": power.iter,
            "error": _copied(power.error_dict),
            "p": _copied(power.p_memory_dict),
            "q": _copied(power.q_memory_dict),
            "rng": {"key": torch.from_numpy(drawn[1].astype(np.int64)), "pos": drawn[2], "gauss": list(drawn[3:])},
        }

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        if not isinstance(saved, Mapping):
            if len(saved) != self._group.size():
                raise StateError(
                    f"{len(saved)} workers saved this and {self._group.size()} load it, which PyTorch's hook cannot; "
                    "resume with the same number"
                )
            saved = saved[self._group.rank()]
        if saved.get("scheme") != str(self.scheme):
            raise StateError(f"the state was saved under {saved.get('scheme')}; resume under that scheme")
        if self._power is not None:
            power = self._power
            rng = saved["rng"]
            power.iter = saved["iter"]
            power.error_dict = _copied(saved["error"])
            power.p_memory_dict = _copied(saved["p"])
            power.q_memory_dict = _copied(saved["q"])
            power.rng.set_state(("MT19937", rng["key"].numpy().astype(np.uint32), rng["pos"], *rng["gauss"]))

    def close(self) -> None:
        """Give the model back: from the next backward pass on DDP averages by itself."""
        self._switch.release()


def _copied(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {index: tensor.detach().clone() for index, tensor in tensors.items()}
