"""attach(model, scheme, group=replicas): FSDP2 shards a model inside a node, and laconic speaks between nodes."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import get_process_group_ranks, get_rank

from laconic.adapters.ddp import GradScaler, SessionAdapter, UnusedSteps, residual_of
from laconic.adapters.rank_agreement import begin_alike_, check_common, check_names
from laconic.errors import LaconicError, SchemeError, StateError
from laconic.layout import Bucket, Layout, plain_name
from laconic.scheme import Scheme, TorchHook
from laconic.session import OnMismatch, Replicas, Session
from laconic.transport import Everyone, Group, ProcessGroup, own_group, world


class Unit:
    """Parameters that FSDP2 reduces together; their gradients, in its order, are one flat padded shard."""

    def __init__(self, name: str, module: Any, group: Any, names: Mapping[nn.Parameter, str]) -> None:
        self.name = name or "the model"
        self.kept: dict[str, Tensor] = {}  # the gradients of micro-batches before the last
        self._module = module
        self._group = group
        self.names: dict[Any, str] = {p: names[p.sharded_param] for p in group.fsdp_params}
        self._watched: set[Any] = set()
        self._given: set[Any] = set()  # who got a gradient since the last reduction
        # After FSDP2's own, which makes parameters whole.
        self._hooks: list[Any] = [each.register_forward_pre_hook(self._watch) for each in group.modules]

    def _watch(self, *_: Any) -> None:
        """Hear which parameters get a gradient: those that get none are left out of the shard without a word."""
        for p in self.names.keys() - self._watched:
            if p.sharded_param.requires_grad:
                self._watched.add(p)
                given = partial(self._note_given, p)
                self._hooks.append(p._unsharded_param.register_post_accumulate_grad_hook(given))

    def _note_given(self, p: Any, _: Tensor) -> None:
        self._given.add(p)

    def call(self, hook: Callable[[Tensor], None]) -> None:
        """Have `hook` overwrite each shard, on FSDP2's stream for all-reduces, which on a mesh of one axis is idle."""
        self._module.set_all_reduce_hook(hook)

    def release(self) -> None:
        """Take every hook off again."""
        self._module.set_all_reduce_hook(None)
        for hook in self._hooks:
            hook.remove()

    @property
    def device(self) -> torch.device:
        """The device of shards of gradients; offloaded parameters are elsewhere."""
        device: torch.device = self._group.device
        return device

    @property
    def is_last_backward(self) -> bool:
        """Return whether this backward pass is the last of its step, as the user told FSDP2."""
        return bool(self._group.all_reduce_grads and self._module._get_fsdp_state()._state_ctx.is_last_backward)

    @property
    def sums(self) -> bool:
        """Return whether FSDP2 divides by a factor of the user's, which then stands for all ranks, replicas too."""
        return getattr(self._group, "gradient_divide_factor", None) is not None  # torch 2.7 has none

    @property
    def trained(self) -> Layout:
        """All that may be in a shard, each parameter with its padding."""
        return self._layout([p for p in self.names if p.sharded_param.requires_grad])

    def layout(self, num_entries: int) -> Layout:
        """The layout of a shard of so many entries; to be asked once for each."""
        given = self._layout([p for p in self.names if p in self._given])
        self._given.clear()
        for layout in (self.trained, given):
            if layout.num_entries == num_entries:
                return layout
        raise LaconicError(f"some parameters of {self.name} got no gradient, and none can tell which; freeze them")

    def _layout(self, parameters: Sequence[Any]) -> Layout:
        return Layout.of([self.names[p] for p in parameters], [p.padded_sharded_param_size for p in parameters])


def check_replicas(model: nn.Module, group: ProcessGroup | None) -> bool:
    """Return whether a model is sharded; SchemeError if so and `group` is not that of this shard's replicas."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]  # a forward pass may have left it whole
    inside = _inside(model)
    if not inside:
        return False
    if not isinstance(group, ProcessGroup):
        raise SchemeError("this model is sharded; say who has its replicas: group=mesh.get_group('replicate')")
    if len(set(inside) & set(get_process_group_ranks(group))) != 1:
        raise SchemeError(
            "some of group= share this model; write fully_shard(..., mesh=mesh['shard']) and "
            "group=mesh.get_group('replicate')"
        )
    return True


def shard_of(model: nn.Module) -> int:
    """This rank's place among those who share a model; 0 where it has all of it."""
    inside = _inside(model)
    return inside.index(get_rank()) if inside else 0


def _inside(model: nn.Module) -> list[int]:
    """The ranks that share a model; none where it is whole."""
    mesh: Any = next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)
    return [] if mesh is None else [int(rank) for rank in mesh.mesh.flatten()]


def units_of(model: nn.Module) -> tuple[list[Unit], Any]:
    """(all that FSDP2 reduces in a model, its mesh of shards), if that is one mesh, and holds all that is trained."""
    modules: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if hasattr(m, "set_all_reduce_hook")]
    names = {p: plain_name(name) for name, p in model.named_parameters()}
    groups: dict[Any, tuple[str, Any]] = {}
    for name, module in modules:
        state = module._get_fsdp_state()
        # Before torch 2.12 there was one at most, under another name.
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            if group is not None:
                groups.setdefault(group, (name or "the model", module))
    _check(groups, names)
    units = [Unit(name, module, group, names) for group, (name, module) in groups.items()]
    return units, next(iter(groups)).mesh_info.mesh


def _check(groups: Mapping[Any, tuple[str, Any]], names: Mapping[nn.Parameter, str]) -> None:
    meshes = {group.mesh_info.mesh for group in groups}
    if len(meshes) > 1 or len(set(groups.values())) < len(groups):
        raise SchemeError("the model is sharded over several meshes; give each fully_shard() the same mesh")
    for group, (name, _) in groups.items():
        if group._all_reduce_hook is not None:
            raise SchemeError(f"{name} has an all-reduce hook already; attach once, to a fresh model")
    reduced = {p.sharded_param for group in groups for p in group.fsdp_params}
    for parameter, name in names.items():
        if parameter.is_meta:
            raise SchemeError(f"{name!r} is on the meta device; give the model values before attach()")
        if parameter.requires_grad and parameter not in reduced:
            raise SchemeError(f"no shards reduce {name!r}; call fully_shard(model, mesh=...) last, or freeze it")


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
    unused_steps: UnusedSteps = "warn",
) -> "FsdpAdapter":
    """Attach to a model under fully_shard(), each of whose shards meets its replicas, `group`."""
    if scheme.is_torch_hook:
        raise SchemeError(f"{scheme} is a hook of DDP's; give FSDP2 a scheme like 'topk:rho=0.01'")
    check_replicas(model, group)
    assert group is not None
    units, mesh = units_of(model)
    device = units[0].device
    check_common(model, scheme, group, device)  # or ranks would wait for each other until the group's timeout
    transport = Group(own_group(group, device, timeout_s), device)
    begin_alike_(model, group, transport, device)
    shards: ProcessGroup = mesh.get_group()
    session = Session(
        scheme,
        transport,
        loss_scale=grad_scaler.get_scale if grad_scaler else None,
        zeroes=on_nonfinite == "zero",
        discards=unused_steps == "discard",
        warns=shards.rank() == 0,
    )
    replicas = Replicas(dict(model.named_parameters()), transport, every=check_replicas_every, on_mismatch=on_mismatch)
    return FsdpAdapter(session, units, shards, device, replicas if scheme.talks else None, unused_steps)


class FsdpAdapter(SessionAdapter):
    """Feeds a session with the shard of each unit's gradient, which waits for the others' in the backward pass.

    FSDP2 has then reduced it inside the node, and goes on with what the session made of it: it divides, converts,
    offloads and accumulates. A step ends with its last backward pass, whatever units took part; `shards` then tell each
    other whether all was finite, since a step that one of them leaves out is left out by all.
    """

    error: BaseException | None = None

    def __init__(
        self,
        session: Session,
        units: Sequence[Unit],
        shards: ProcessGroup,
        device: torch.device,
        replicas: Replicas | None,
        unused_steps: UnusedSteps,
    ) -> None:
        self._parameters = [p.sharded_param for unit in units for p in unit.names]
        super().__init__(session, Everyone(world()), replicas, self._parameters, unused_steps)
        self._units = units
        self._shards = shards
        self._device = device
        self._num_received = 0  # units that took part in the step that is under way
        self._num_discarded = 0
        self._waited_s = self._last_waited_s = 0.0  # by the backward pass, in this step and the last
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
        follows_unused = False
        if not self._num_received:
            if self._watch is not None:
                self._watch.look()
            follows_unused = self._follows_unused()
            self._num_discarded += follows_unused
            # After FSDP2's own, which reduces what is left.
            Variable._execution_engine.queue_callback(partial(self._or_fail, self._end_step_))
        start = time.perf_counter()
        bucket = Bucket(self._num_received, layout, shard, is_last=False, follows_unused=follows_unused)
        self.session.exchange_(bucket)
        self._waited_s += time.perf_counter() - start
        self._num_received += 1
        if unit.sums:
            shard *= self.transport.num_workers

    def _end_step_(self) -> None:
        for unit in self._units:
            if unit.kept:
                raise LaconicError(
                    f"{min(unit.kept)!r} got a gradient in the first micro-batches alone; accumulate with "
                    "set_requires_gradient_sync(False)"
                )
        counts = int(self.session.finite_so_far), self._num_discarded, -self._num_discarded
        least = torch.tensor(counts, device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._shards)
        finite, fewest, most = least.tolist()
        if fewest != -most:
            raise LaconicError("some shards of this model took a step back, and others did not; let all ranks do so")
        self._num_received = 0
        self._last_waited_s, self._waited_s = self._waited_s, 0.0
        self.session.end_step_(finite=bool(finite))
        if self._watch is not None:
            self._watch.note_exchanged()
        if self._replicas is not None and self._replicas.are_due():
            self._replicas.check_()

    def discard_(self) -> None:
        super().discard_()
        self._num_discarded += 1

    def metrics(self, *, norms: bool = False) -> dict[str, float]:
        residual = residual_of(self.session, self._parameters) if norms else {}
        return self.session.metrics(waited_ms=1e3 * self._last_waited_s, **residual)

    def state_dict(self) -> dict[str, Any]:
        return {**self.session.state_dict(), "shard": self._shards.rank(), "num_shards": self._shards.size()}

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        states = [saved] if isinstance(saved, Mapping) else saved
        here = self._shards.rank(), self._shards.size()
        own = [state for state in states if (state.get("shard"), state.get("num_shards")) == here]
        if not own:
            raise StateError(f"none of these states is of shard {here[0]} of {here[1]}; load what this rank saved")
        check_names(own, {name for unit in self._units for name in unit.names.values()})
        self.session.load_state_dict(own)

    def close(self) -> None:
        """End the session: from the next backward pass on FSDP2 reduces inside the node, and nobody between nodes."""
        for unit in self._units:
            unit.release()
        self._take_hooks_off()
        self.transport.close()
