"""attach(ddp, scheme): DDP's communication hook, a process group of our own, a session."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from laconic import kernels
from laconic.adapters.optimizers import AdamAdvice, UseWatch
from laconic.adapters.rank_agreement import check_common, check_names
from laconic.adapters.torch_hooks import HookSwitch, TorchHookSession, check_free
from laconic.errors import SchemeError, StateError
from laconic.layout import Bucket, Layout, local, only_device, plain_name
from laconic.paths import bytes_out
from laconic.recipes import parse
from laconic.scheme import AnyScheme, Scheme, TorchHook
from laconic.server.client import connect_to_servers
from laconic.server.serve import TIMEOUT_S, served_scheme, worker_terms
from laconic.session import (
    Attached,
    Background,
    OnMismatch,
    Replicas,
    Session,
    Stats,
    belongs_on_host,
    check_on_mismatch,
)
from laconic.transport import (
    Everyone,
    Group,
    Transport,
    as_peer_error,
    longest_message,
    own_group,
    ring_bytes,
)

_log = logging.getLogger("laconic.adapters")

# Entries of a model: three threads that hand a small bucket on cost a plain sum a fifteenth of its step.
WORTH_A_PIPELINE = 1 << 22

UnusedSteps = Literal["warn", "discard", "ignore"]


class GradScaler(Protocol):
    """A torch.amp.GradScaler, as far as it is used."""

    def get_scale(self) -> float: ...


class SessionOptions(TypedDict, total=False):
    """Those of attach() that concern a session, wherever its buckets come from."""

    grad_scaler: GradScaler | None
    pipeline: bool | None
    on_nonfinite: Literal["nan", "zero"]
    on_mismatch: OnMismatch
    check_replicas_every: int
    unused_steps: UnusedSteps


def attach_to_ddp(
    ddp: nn.Module,
    scheme: Scheme | TorchHook,
    *,
    servers: Sequence[int] = (),
    timeout_s: float | None = None,
    **options: Unpack[SessionOptions],
) -> Attached:
    """Attach to a DistributedDataParallel, with the options of laconic.attach()."""
    ddp, named, device = ready(ddp, scheme)
    ranks: ProcessGroup = ddp.process_group
    transport: Transport
    if servers:
        scheme = served_scheme(scheme)
        longest = longest_message([*ddp.parameters(), *ddp.buffers()])
        undoes = options.get("grad_scaler") is not None
        terms = worker_terms(scheme, undoes=undoes, holds_idle=ddp.find_unused_parameters, longest=longest)
        transport = connect_to_servers(ranks.rank(), ranks.size(), servers, terms, timeout_s or TIMEOUT_S, longest)
    else:
        own = own_group(ranks, device, timeout_s)
        if scheme.is_torch_hook:
            return TorchHookSession(ddp, scheme, own)
        transport = Group(own, device)
    holds_idle = ddp.find_unused_parameters
    adapter = DdpAdapter(named, scheme, transport, Everyone(ranks), device, holds_idle=holds_idle, **options)
    adapter.listen(HookSwitch.of(ddp))
    if transport.rank == 0:
        for remark in adapter.remarks():
            _log.warning(remark)
        if servers and ddp.broadcast_buffers and next(ddp.module.buffers(), None) is not None:
            _log.warning(
                "DDP broadcasts this model's buffers at every step, which ends with the first worker that dies; "
                "build DistributedDataParallel(..., broadcast_buffers=False)"
            )
    return adapter


def ready(
    ddp: nn.Module, scheme: AnyScheme | str
) -> tuple[DistributedDataParallel, dict[str, nn.Parameter], torch.device]:
    """(the module, its parameters, where they are), once it is known that it can take a session on all ranks."""
    ddp = _checked(ddp)
    named = dict(ddp.module.named_parameters())
    device = only_device({name: p for name, p in named.items() if p.requires_grad})
    check_common(ddp.module, scheme, ddp.process_group, device)  # or ranks would wait until the group's timeout
    return ddp, named, device


def check_options(
    scheme: Scheme | TorchHook,
    grad_scaler: GradScaler | None = None,
    on_nonfinite: str = "nan",
    on_mismatch: str = "warn",
    unused_steps: str = "warn",
) -> None:
    """SchemeError where these do not go together."""
    if unused_steps not in ("warn", "discard", "ignore"):
        raise SchemeError(f"unused_steps is {unused_steps!r}; give 'warn', 'discard' or 'ignore'")
    if on_nonfinite not in ("nan", "zero"):
        raise SchemeError(f"on_nonfinite is {on_nonfinite!r}; give 'nan' or 'zero'")
    check_on_mismatch(on_mismatch)
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise SchemeError(f"grad_scaler is {grad_scaler!r}; give the torch.amp.GradScaler that scales the loss")
    if on_nonfinite == "zero" and grad_scaler is not None:
        raise SchemeError("a GradScaler must see Inf to make its scale smaller; leave on_nonfinite out")
    if on_nonfinite == "zero" and scheme.is_torch_hook:
        raise SchemeError(f"{scheme} is PyTorch's own hook; leave on_nonfinite out, and look at last_step_finite")


def of_gradients(scheme: AnyScheme | str) -> Scheme | TorchHook:
    """The scheme, if it is one of gradients."""
    scheme = parse(scheme)
    if not hasattr(scheme, "of_what"):
        raise SchemeError(
            f"attach takes a scheme, not {type(scheme).__name__}; give a text like 'topk:rho=0.01', "
            "laconic.recipes.topk(rho=0.01) or a Scheme(...)"
        )
    if scheme.of_what != "gradients":
        what = scheme.of_what
        raise SchemeError(f"{scheme} exchanges {what}, not gradients; use laconic.follow(model, optimizer, scheme)")
    if scheme.exchange.in_pairs:
        raise SchemeError(
            "Pairs let workers differ, and gradients must be the same on all; use AllReduce(), or OuterScheme(...)"
        )
    return scheme


def _checked(ddp: nn.Module) -> DistributedDataParallel:
    """The module, if it is one of DDP's and can take a hook."""
    if not isinstance(ddp, DistributedDataParallel):
        raise SchemeError(
            f"attach takes a DistributedDataParallel module, not {type(ddp).__name__}; "
            "write attach(DistributedDataParallel(model), scheme)"
        )
    check_free(ddp)
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise SchemeError(
                f"{name or 'the model'} makes sparse gradients, which laconic cannot add; set sparse=False"
            )
    return ddp


def residual_of(session: Session, parameters: Iterable[Tensor]) -> dict[str, float]:
    """{"residual": the norm of what a session keeps over that of these gradients}; nothing where those are gone."""
    gradients = [local(p.grad).detach() for p in parameters if p.grad is not None]
    norm = float(get_total_norm(gradients)) if gradients else 0.0
    return {"residual": session.residual_norm() / norm} if norm else {}


class SessionAdapter(Attached):
    """A session that is fed by a framework: what its user asks of it, and what becomes of the gradients it leaves."""

    transport: Transport
    everyone: Everyone

    def __init__(
        self,
        session: Session,
        everyone: Everyone,
        replicas: Replicas | None,
        parameters: Sequence[Tensor],
        unused_steps: UnusedSteps,
        *,
        advises: bool = True,
    ) -> None:
        keeps = bool(session.scheme.memory.kinds)  # so that what is thrown away would come back
        self.session = session
        self.transport = session.transport
        self.everyone = everyone
        self._replicas = replicas
        self._unused_steps = unused_steps
        self._watch = UseWatch(parameters) if keeps and unused_steps != "ignore" and parameters else None
        self._advice = AdamAdvice.where_due(session.scheme, parameters, everyone.rank) if advises else None

    def _follows_unused(self) -> bool:
        """Return whether the last step's gradients are gone, and no optimizer used them; a warning says so once."""
        unused = self._watch is not None and self._watch.was_unused() and self.last_step_finite
        if unused and self._unused_steps == "warn":
            self._stop_watching()
            if self.everyone.rank == 0:
                _log.warning(
                    "gradients were cleared that no optimizer had used, and %s keeps what it did not send of them, to "
                    "send it later; leave such a backward pass out of the exchange (ddp.no_sync()), or "
                    "attach(..., unused_steps='discard')",
                    self.session.scheme,
                )
        return unused

    def discard_(self) -> None:
        if self._unused_steps != "discard":
            raise StateError("a step can be taken back if attach() is given unused_steps='discard'; give it there")
        self.session.discard_if_(True)
        if self._watch is not None:
            self._watch.note_discarded()

    @property
    def last_step_finite(self) -> bool:
        return self.session.last_step_finite

    def check_replicas_(self) -> None:
        if self._replicas is not None:
            self._replicas.check_()

    def stats(self, *, ages: bool = False) -> Stats:
        return self.session.stats(ages=ages)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _take_hooks_off(self) -> None:
        self._stop_watching()
        if self._advice is not None:
            self._advice.close()


class DdpAdapter(SessionAdapter):
    """Feeds a session with DDP's buckets through a background thread.

    `named` are the model's parameters as far as they are known; others get names by their place in DDP's first buckets.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        scheme: Scheme,
        transport: Transport,
        everyone: Everyone,
        device: torch.device,
        *,
        grad_scaler: GradScaler | None = None,
        holds_idle: bool = False,
        pipeline: bool | None = None,
        on_nonfinite: Literal["nan", "zero"] = "nan",
        on_mismatch: OnMismatch = "warn",
        check_replicas_every: int = 100,
        unused_steps: UnusedSteps = "warn",
        advises: bool = True,
    ) -> None:
        session = Session(
            scheme,
            transport,
            loss_scale=grad_scaler.get_scale if grad_scaler else None,
            holds_idle=holds_idle,
            zeroes=on_nonfinite == "zero",
            discards=unused_steps == "discard",
        )
        self._device = device
        self._named = dict(named)
        self._names = {p: plain_name(name) for name, p in named.items()}
        trained = [p for p in self._names if p.requires_grad]
        replicas = None  # who is silent has a model of its own
        if scheme.talks:
            replicas = Replicas(self._named, transport, every=check_replicas_every, on_mismatch=on_mismatch)
        super().__init__(session, everyone, replicas, trained, unused_steps, advises=advises)
        self._model = self._layout(trained)
        self._on_host = scheme.talks and belongs_on_host(self._model, device, transport.wire)
        if pipeline is None:
            pipeline = self._model.num_entries >= WORTH_A_PIPELINE
        self._background = Background(session, device, on_host=self._on_host, pipelined=pipeline, replicas=replicas)
        self._pending: list[Future[Tensor]] = []  # this backward pass's buckets
        self._waited_s = 0.0  # by the last one, for them
        self._switch: HookSwitch | None = None

    def listen(self, switch: HookSwitch) -> None:
        """Take a DDP module's buckets until close()."""
        switch.listener = self.submit
        self._switch = switch

    def remarks(self) -> list[str]:
        """Remarks that a user should know before training."""
        scheme = self.session.scheme
        num_workers = self.transport.num_workers
        here = bytes_out(scheme, self._model, num_workers)
        dense = ring_bytes(2 * self._model.num_entries, num_workers)
        remarks = []
        if not scheme.exchange.adds_in_flight and here > 1.02 * dense:  # headers aside
            cure = "bf16, or a smaller rho" if scheme.has_owners else "bf16, a smaller rho, or a server"
            remarks.append(
                f"{scheme} sends {here / dense:.1f} times the bytes of a bf16 all-reduce among {num_workers} workers; "
                f"use {cure}"
            )
        slower = None if self._on_host else kernels.missing(self._device)
        if slower is not None:
            remarks.append(slower)
        return remarks

    @property
    def error(self) -> BaseException | None:
        """The error of the session's thread."""
        return self._background.error

    def submit(self, bucket: GradBucket) -> Future[Tensor]:
        """Exchange one of DDP's buckets, in the background."""
        follows_unused = False
        if not self._pending:
            # Before DDP's own, which would wrap what went wrong in a RuntimeError.
            Variable._execution_engine.queue_callback(self._end_backward)
            follows_unused = self._follows_unused()
        layout = self._layout(bucket.parameters())
        averaged = self._background.submit(
            Bucket(bucket.index(), layout, bucket.buffer(), bucket.is_last(), follows_unused=follows_unused)
        )
        self._pending.append(averaged)
        return averaged

    def _end_backward(self) -> None:
        """Wait for all buckets, as DDP is about to, and raise what went wrong as what it is."""
        pending, self._pending = self._pending, []
        start = time.perf_counter()
        for averaged in pending:
            with suppress(Exception):
                averaged.wait()
        self._waited_s = time.perf_counter() - start
        if self.error is not None:
            raise as_peer_error(self.error, self.transport.rank, "a peer has ended or cannot be reached")
        if self._watch is not None:
            Variable._execution_engine.queue_callback(self._watch.note_exchanged)  # after DDP's own

    def _layout(self, parameters: Sequence[Tensor]) -> Layout:
        for parameter in parameters:
            if parameter not in self._names:
                self._names[parameter] = f"parameter {len(self._names)}"
                self._named[self._names[parameter]] = parameter
        return Layout.of([self._names[p] for p in parameters], [p.shape for p in parameters])

    def metrics(self, *, norms: bool = False) -> dict[str, float]:
        residual = residual_of(self.session, self._named.values()) if norms else {}
        return self.session.metrics(waited_ms=1e3 * self._waited_s, **residual)

    def state_dict(self) -> dict[str, Any]:
        return self.session.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        check_names([saved] if isinstance(saved, Mapping) else saved, self._names.values())
        self.session.load_state_dict(saved)

    def stop(self) -> None:
        """End the session's thread; the transport stays open."""
        self._take_hooks_off()
        self._background.close()

    def close(self) -> None:
        if self._switch is not None:
            self._switch.release()
        self.stop()
        self.transport.close()
