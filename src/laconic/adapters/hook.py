"""hook(scheme): the pair that register_comm_hook takes, for who builds DDP out of sight."""

# No deferred annotations here: DDP checks those of its hook.

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future

from laconic.adapters.ddp import DdpAdapter, SessionOptions, check_options, of_gradients
from laconic.adapters.rank_agreement import check_common
from laconic.adapters.torch_hooks import unwrapped
from laconic.errors import SchemeError, StateError, check_timeout
from laconic.layout import only_device
from laconic.scheme import AnyScheme, Scheme
from laconic.session import Observed, Stats
from laconic.transport import Everyone, Group, own_group, world

_log = logging.getLogger("laconic.adapters")


def hook(
    scheme: AnyScheme | str,
    model: nn.Module | None = None,
    *,
    group: ProcessGroup | None = None,
    find_unused_parameters: bool = False,
    timeout_s: float | None = None,
    **options: Unpack[SessionOptions],
) -> tuple["HookSession", Callable[["HookSession", GradBucket], Future[Tensor]]]:
    """(state, hook) for whoever calls register_comm_hook(state, hook) itself; a pair for each module, on all its ranks.

    The session begins in the first backward pass. A hook is not told of its DistributedDataParallel: say here if that
    has a `group` other than all ranks, or `find_unused_parameters`. Without `model` parameters go by their place in
    DDP's first buckets: a state then fits the same model with the same bucket_cap_mb. Servers need attach().
    """
    check_timeout(timeout_s)
    scheme = of_gradients(scheme)
    if scheme.is_torch_hook:
        raise SchemeError(f"{scheme} is PyTorch's own hook; register that one, or use laconic.attach")
    chosen = ("grad_scaler", "on_nonfinite", "on_mismatch", "unused_steps")
    check_options(scheme, **{name: value for name, value in options.items() if name in chosen})  # type: ignore[arg-type]
    state = HookSession(scheme, model, group, timeout_s, holds_idle=find_unused_parameters, options=options)
    return state, HookSession.run


class HookSession(Observed):
    """A session that begins with the first bucket; before, it only takes a state to continue from."""

    def __init__(
        self,
        scheme: Scheme,
        model: nn.Module | None,
        group: ProcessGroup | None,
        timeout_s: float | None,
        *,
        holds_idle: bool,
        options: SessionOptions,
    ) -> None:
        self._scheme = scheme
        self._model = model
        self._group = group
        self._timeout_s = timeout_s
        self._holds_idle = holds_idle
        self._options = options
        self._adapter: DdpAdapter | None = None
        self._saved: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None

    def run(self, bucket: GradBucket) -> Future[Tensor]:
        """Exchange one of DDP's buckets, in the background."""
        if self._adapter is None:
            self._adapter = self._begun(bucket.parameters())
        return self._adapter.submit(bucket)

    def _begun(self, first: Sequence[Tensor]) -> DdpAdapter:
        """The adapter, made by all ranks with the parameters of their first bucket, which is the same on each."""
        group = self._group or world()
        named = {f"parameter {place}": parameter for place, parameter in enumerate(first)}
        if self._model is not None:
            named = dict(unwrapped(self._model).named_parameters())
        device = only_device({name: p for name, p in named.items() if p.requires_grad})
        check_common(named, self._scheme, group, device)
        transport = Group(own_group(group, device, self._timeout_s), device)
        everyone = Everyone(group)
        adapter = DdpAdapter(
            named, self._scheme, transport, everyone, device, holds_idle=self._holds_idle, **self._options
        )
        if transport.rank == 0:
            for remark in adapter.remarks():
                _log.warning(remark)
        if self._saved is not None:
            self._load(adapter, self._saved)
            self._saved = None
        return adapter

    def _load(self, adapter: DdpAdapter, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Without the model it is not known yet which names there will be."""
        (adapter.session if self._model is None else adapter).load_state_dict(saved)

    @property
    def session(self) -> DdpAdapter:
        """The session that attach() would have returned."""
        if self._adapter is None:
            raise StateError("this hook has not been called yet; ask after the first backward pass")
        return self._adapter

    def stats(self, *, ages: bool = False) -> Stats:
        """Those of the session."""
        return self.session.stats(ages=ages)

    def metrics(self, *, norms: bool = False) -> dict[str, float]:
        """Those of the session."""
        return self.session.metrics(norms=norms)

    def discard_(self) -> None:
        """Take the session's last step back."""
        self.session.discard_()

    def __repr__(self) -> str:
        return f"<HookSession {self._scheme}: not begun>" if self._adapter is None else super().__repr__()

    def state_dict(self) -> dict[str, Any]:
        return self.session.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        if self._adapter is None:
            self._saved = saved
        else:
            self._load(self._adapter, saved)

    def _all_ranks(self) -> Everyone:
        return Everyone(self._group or world())

    def close(self) -> None:
        """End the session's thread."""
        if self._adapter is not None:
            self._adapter.close()
