"""attach(model, scheme, group=replicas): FSDP2 shards a model inside a node, and laconic speaks between nodes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from laconic.adapters.alike import begin_alike_, check_common, check_names
from laconic.adapters.ddp import GradScaler
from laconic.adapters.shards import Unit, check_replicas, units_of
from laconic.errors import LaconicError, SchemeError, StateError
from laconic.layout import Bucket
from laconic.scheme import Scheme, TorchHook
from laconic.session import OnMismatch, Replicas, SavedTogether, Session, Stats
from laconic.transport import Everyone, Group, ProcessGroup, own_group, world


def attach_to_shards(
    model: nn.Module,
    scheme: Scheme | TorchHook,
    group: ProcessGroup | None,
    *,
    timeout_s: float | None = None,
    grad_scaler: GradScaler | None = None,
    on_nonfinite: str = "nan",
    on_mismatch: OnMismatch = "warn",
    check_replicas_every: int = 100,
) -> "FsdpAdapter":
    """What laconic.attach() does for a model under fully_shard(), each of whose shards meets its replicas, `group`."""
    if scheme.is_torch_hook:
        raise SchemeError(f"{scheme} is a hook of DDP's; give FSDP2 a scheme like 'topk:rho=0.01'")
    check_replicas(model, group)
    assert group is not None
    units, mesh = units_of(model)
    device = units[0].device
    check_common(model, scheme, group, device)  # or ranks would wait for each other until the group's timeout
    transport = Group(own_group(group, device, timeout_s), device)
    begin_alike_(model, group, transport, device)
    loss_scale = grad_scaler.get_scale if grad_scaler else None
    session = Session(scheme, transport, loss_scale=loss_scale, zeroes=on_nonfinite == "zero")
    replicas = Replicas(dict(model.named_parameters()), transport, every=check_replicas_every, on_mismatch=on_mismatch)
    return FsdpAdapter(session, units, mesh.get_group(), device, replicas if scheme.talks else None)


class FsdpAdapter(SavedTogether):
    """Feeds a session with the shard of each unit's gradient, which waits for the others' in the backward pass.

    FSDP2 has then reduced it inside the node, and goes on with what the session made of it: it divides, converts,
    offloads and accumulates. A step ends with its last backward pass, whatever units took part; `shards` then tell each
    other whether all was finite, since a step that one of them leaves out is left out by all.
    """

    def __init__(
        self,
        session: Session,
        units: Sequence[Unit],
        shards: ProcessGroup,
        device: torch.device,
        replicas: Replicas | None,
    ) -> None:
        self.session = session
        self.transport = session.transport
        self.everyone = Everyone(world())
        self.error: BaseException | None = None
        self._units = units
        self._shards = shards
        self._device = device
        self._replicas = replicas
        self._num_heard = 0  # units that took part in the step that is under way
        for unit in units:
            unit.call(partial(self._or_fail, self._take_, unit))

    def _or_fail(self, act: Callable[..., None], *arguments: Any) -> None:
        """After a first failure nothing is tried again: the replicas no longer agree on the order."""
        if self.error is not None:
            raise self.error
        try:
            act(*arguments)
        except BaseException as error:
            self.error = error
            raise

    def _take_(self, unit: Unit, shard: Tensor) -> None:
        """Overwrite one unit's shard with the mean over replicas, or keep it for the step's last backward pass."""
        if shard.is_cuda:  # FSDP2 made it on another stream, and may drop it before this one is through
            shard.record_stream(torch.cuda.current_stream(shard.device))
        layout = unit.layout(shard.numel())
        for span in layout.spans:
            part = shard[span.start : span.stop]
            if span.name in unit.kept:
                part += unit.kept.pop(span.name)
        if not unit.is_last_backward:
            unit.kept |= {span.name: shard[span.start : span.stop].clone() for span in layout.spans}
            shard.zero_()
            return
        if not self._num_heard:
            # After FSDP2's own, which reduces what is left.
            Variable._execution_engine.queue_callback(partial(self._or_fail, self._end_step_))
        self.session.exchange_(Bucket(self._num_heard, layout, shard, is_last=False))
        self._num_heard += 1
        if unit.sums:
            shard *= self.transport.num_workers

    def _end_step_(self) -> None:
        for unit in self._units:
            if unit.kept:
                raise LaconicError(
                    f"{min(unit.kept)!r} got a gradient in the first micro-batches alone; accumulate with "
                    "set_requires_gradient_sync(False)"
                )
        finite = torch.tensor(int(self.session.finite_so_far), device=self._device)
        dist.all_reduce(finite, dist.ReduceOp.MIN, group=self._shards)
        self._num_heard = 0
        self.session.end_step_(finite=bool(finite))
        if self._replicas is not None and self._replicas.are_due():
            self._replicas.check_()

    @property
    def last_step_finite(self) -> bool:
        return self.session.last_step_finite

    def check_replicas_(self) -> None:
        if self._replicas is not None:
            self._replicas.check_()

    def stats(self, *, ages: bool = False) -> Stats:
        return self.session.stats(ages=ages)

    def state_dict(self) -> dict[str, Any]:
        return {**self.session.state_dict(), "shard": self._shards.rank(), "num_shards": self._shards.size()}

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        states = [saved] if isinstance(saved, Mapping) else saved
        here = self._shards.rank(), self._shards.size()
        mine = [state for state in states if (state.get("shard"), state.get("num_shards")) == here]
        if not mine:
            raise StateError(f"none of these states is of shard {here[0]} of {here[1]}; load what this rank saved")
        check_names(mine, {name for unit in self._units for name in unit.names.values()})
        self.session.load_state_dict(mine)

    def close(self) -> None:
        """End the session: from the next backward pass on FSDP2 reduces inside the node, and nobody between nodes."""
        for unit in self._units:
            unit.release()
        self.transport.close()
