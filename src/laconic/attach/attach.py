"""attach(ddp, scheme): DDP's communication hook, a process group of our own, a session."""

# No deferred annotations here: DDP checks those of its hook.

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic import kernels
from laconic.attach.torch_hooks import TorchHookSession
from laconic.errors import SchemeError, StateError
from laconic.exchange import Silent
from laconic.layout import Bucket, Layout
from laconic.recipes import parse
from laconic.scheme import AnyScheme, GossipScheme, Scheme, TorchHook
from laconic.server.client import ServerClient
from laconic.server.serve import TIMEOUT_S, greeting, meet, served_scheme
from laconic.session import Background, Session, Stats, belongs_on_host
from laconic.transport import Group, own_group, ranks_that_differ


@runtime_checkable
class Attached(Protocol):
    """What attach() returns, whatever the scheme."""

    def stats(self) -> Stats:
        """Bytes out and in, by kind; seconds by phase; the ratio to dense."""

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, to be saved per rank."""

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from this rank's state, or from a list of all ranks' states."""

    def close(self) -> None:
        """End the session's thread; the interpreter's exit does the same."""


class GradScaler(Protocol):
    """What is asked of a torch.amp.GradScaler."""

    def get_scale(self) -> float: ...


def attach(
    ddp: DistributedDataParallel,
    scheme: AnyScheme | str,
    *,
    grad_scaler: GradScaler | None = None,
    servers: Sequence[int] = (),
    timeout_s: float = TIMEOUT_S,
) -> Attached:
    """Let `ddp` exchange its gradients under `scheme`; a call that all its ranks make, before the first backward.

    Give the GradScaler that scales the loss, if one does: what is kept then stays in unscaled units. With `servers`,
    ranks that call serve() meanwhile and are not among ddp's, those answer; without, the workers do so themselves.
    """
    scheme = _checked(ddp, scheme)
    group: ProcessGroup = ddp.process_group
    trained = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
    device = _only_device(trained)
    if servers:
        scheme = served_scheme(scheme)
        terms = {"undoes": grad_scaler is not None, "holds_idle": ddp.find_unused_parameters}
        transport = ServerClient(group.rank(), group.size(), meet(servers, None), greeting(scheme, **terms), timeout_s)
        return DdpSession(ddp, scheme, transport, device, grad_scaler)
    own = own_group(group, device)
    strangers = ranks_that_differ(own, device, str(scheme))
    if strangers:  # said here, since ranks that do not agree would wait for each other until the group's timeout
        raise SchemeError(
            f"this rank attaches {scheme}, rank {strangers[0]} another scheme; attach the same on all ranks"
        )
    if isinstance(scheme, TorchHook):
        return TorchHookSession(ddp, scheme, own)
    return DdpSession(ddp, scheme, Group(own, device), device, grad_scaler)


def _checked(ddp: DistributedDataParallel, scheme: AnyScheme | str) -> Scheme | TorchHook:
    """The scheme, if it is one and `ddp` can take it."""
    if isinstance(scheme, str):
        scheme = parse(scheme)
    if isinstance(scheme, GossipScheme):
        raise SchemeError(f"{scheme} exchanges models, not gradients; use laconic.follow(model, optimizer, scheme)")
    if not isinstance(scheme, Scheme | TorchHook):
        raise SchemeError(
            f"attach takes a scheme, not {type(scheme).__name__}; give a text like 'topk:rho=0.01', "
            "laconic.recipes.topk(rho=0.01) or a Scheme(...)"
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise SchemeError(
            f"attach takes a DistributedDataParallel module, not {type(ddp).__name__}; "
            "write attach(DistributedDataParallel(model), scheme)"
        )
    if ddp._comm_hooks:
        raise SchemeError(
            "this module has a communication hook already; attach once, to a fresh DistributedDataParallel"
        )
    return scheme


def _only_device(trained: Mapping[str, Tensor]) -> torch.device:
    """Where the gradients are; an error where laconic cannot work on them."""
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise SchemeError(
                f"the gradient of {name!r} is {parameter.dtype}; laconic exchanges real floating-point ones"
            )
    devices = {parameter.device for parameter in trained.values()}
    if len(devices) > 1:
        raise SchemeError(f"the model lies on {len(devices)} devices; laconic takes one device per process")
    return devices.pop()


class DdpSession(Session):
    """A session fed by DDP's hook through a background thread."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        scheme: Scheme,
        transport: Group | ServerClient,
        device: torch.device,
        grad_scaler: GradScaler | None,
    ) -> None:
        super().__init__(
            scheme,
            transport,
            loss_scale=grad_scaler.get_scale if grad_scaler else None,
            holds_idle=ddp.find_unused_parameters,
        )
        # A compiled module keeps its parameters' names behind a prefix that a checkpoint should not depend on.
        self._names = {p: name.replace("_orig_mod.", "") for name, p in ddp.module.named_parameters()}
        trained = {name: p for p, name in self._names.items() if p.requires_grad}
        model = Layout.of(list(trained), [p.numel() for p in trained.values()])
        talks = not isinstance(scheme.exchange, Silent)
        on_host = talks and belongs_on_host(model, device, transport.wire)
        slower = None if on_host else kernels.missing(device)
        if transport.rank == 0:
            scheme.warn_if_dense_is_smaller(model, transport.num_workers)
            if slower is not None:
                warnings.warn(slower, stacklevel=4)
            if (
                isinstance(transport, ServerClient)
                and ddp.broadcast_buffers
                and next(ddp.module.buffers(), None) is not None
            ):
                warnings.warn(
                    "DDP broadcasts this model's buffers at every step, which ends with the first worker that dies; "
                    "build DistributedDataParallel(..., broadcast_buffers=False)",
                    stacklevel=4,
                )
        self._transport = transport
        self.background = Background(self, device, on_host=on_host)
        ddp.register_comm_hook(self, _hook)

    def bucket_of(self, bucket: GradBucket) -> Bucket:
        parameters = bucket.parameters()
        layout = Layout.of([self._names[p] for p in parameters], [p.numel() for p in parameters])
        return Bucket(bucket.index(), layout, bucket.buffer(), bucket.is_last())

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        states = [saved] if isinstance(saved, Mapping) else saved
        names = {name for state in states for kept in state.get("memory", {}).values() for name in kept}
        strange = sorted(names - set(self._names.values()))
        if strange:
            raise StateError(
                f"the state holds {strange[0]!r}, which the model does not; load the state of the same model"
            )
        if isinstance(self.transport, ServerClient):
            self.transport.load_server_states(_server_states(states, self.transport.num_shares))
        super().load_state_dict(saved)

    def state_dict(self) -> dict[str, Any]:
        """This worker's state; under dedicated servers, a call that all workers make, and one gets theirs too."""
        if not isinstance(self.transport, ServerClient):
            return super().state_dict()
        kept = self.transport.server_states()  # which also tells who is there
        servers = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in kept if each]
        return {**super().state_dict(), "servers": servers}

    def close(self) -> None:
        self.background.close()
        self._transport.close()


def _server_states(states: Sequence[Mapping[str, Any]], num_servers: int) -> list[bytes]:
    """What each server kept, from the one worker's state that has it; nothing where none of these has."""
    found = [state["servers"] for state in states if state.get("servers")]
    if (found and len(found[0]) != num_servers) or any(state["owner"] for state in states):
        raise StateError("the state was saved with other servers; resume with as many as then")
    return [bytes(each.numpy()) for each in found[0]] if found else []


def _hook(session: DdpSession, bucket: GradBucket) -> Future[Tensor]:
    return session.background.submit(session.bucket_of(bucket))
