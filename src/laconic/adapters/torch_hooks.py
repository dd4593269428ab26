"""PyTorch's own hooks as controls: unchanged, on a group that counts their bytes."""

# No deferred annotations here: DDP checks those of its hook.

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic import kernels
from laconic.adapters.switch import HookSwitch
from laconic.errors import SchemeError, StateError
from laconic.paths import PHASES
from laconic.scheme import TorchHook
from laconic.session import Observed, Stats, StepMeter
from laconic.transport import CountedGroup, Everyone, backend_for, ring_bytes


class TorchHookSession(Observed):
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
        self._heard: list[Tensor] = []  # in this step
        self._step_is_whole = True
        self._meter = StepMeter()
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
            self._heard = []
            self._meter.end_step(self._totals())
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
            self._heard.append(value)
        return value

    @property
    def last_step_finite(self) -> bool:
        return all(map(kernels.all_finite, self._heard))

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
        return self._meter.metrics(self._totals(), step=self._steps, members=self._group.size())

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
