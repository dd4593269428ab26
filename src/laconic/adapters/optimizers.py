"""Optimizers use gradients that were exchanged: not at all, or less than they could."""

import logging
import weakref
from collections.abc import Collection, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from laconic.layout import local
from laconic.scheme import Scheme

_log = logging.getLogger("laconic.adapters")

_MOMENTS = ("exp_avg", "exp_inf", "row_var", "variance")  # how names begin of what Adam's kin keep of a parameter


class UseWatch:
    """Notices that gradients were cleared after an exchange while no optimizer stepped their parameters.

    An optimizer's hook tells of a step; a parameter's version counter of one that an own loop made; the values of the
    smallest parameter, which goes whole at every step, of one that went past both. Accumulation without no_sync()
    clears nothing in between, so it is none. The cost is a call per optimizer step, two per backward pass and a copy of
    that parameter, some 10 us in all; values are compared only where all else says so.

    Of parameters in shards, whose gradients autograd never sees, `look` is to be called where hooks would be.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        trained = [p for p in parameters if p.requires_grad and local(p).numel()] or list(parameters)
        self._ids = {id(parameter) for parameter in trained}
        # Autograd reaches the last parameter first: its hook runs before the first bucket is full.
        self._watched = [trained[-1], trained[0]]
        self._smallest = min(map(local, trained), key=Tensor.numel)
        self._before = self._smallest  # its values as of the last exchange
        self._cleared = False
        self._stepped = True
        self._versions: list[int] = []
        self._grad_versions: dict[int, int] = {}
        self._steps_ours: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        here = weakref.ref(self)
        self._hooks: list[Any] = [p.register_hook(_OnGradient(here, p)) for p in dict.fromkeys(self._watched)]  # type: ignore[no-untyped-call]
        self._hooks.append(register_optimizer_step_post_hook(_OnStep(self)))

    def note_exchanged(self) -> None:
        """Begin to watch what becomes of the gradients that a backward pass has left."""
        self._cleared = False
        self._stepped = False
        self._versions = [parameter._version for parameter in self._watched]
        self._grad_versions = {id(p): p.grad._version for p in self._watched if p.grad is not None}
        self._before = self._smallest.clone()

    def was_unused(self) -> bool:
        """Return whether the last exchange changed no parameter, and its gradients are gone; ask in the next pass."""
        if self._stepped or not self._cleared:
            return False
        versions = [parameter._version for parameter in self._watched]
        self._stepped = versions != self._versions or not torch.equal(self._smallest, self._before)
        return not self._stepped

    def note_discarded(self) -> None:
        """The last exchange was taken back, so nothing of it is left to be used."""
        self._stepped = True

    def note_gradient(self, parameter: Tensor) -> None:
        """A gradient of this parameter is about to be added to what is there: see whether that was cleared."""
        if not self._stepped and not self._cleared:
            grad = parameter.grad
            was_written = grad is not None and grad._version != self._grad_versions.get(id(parameter))
            self._cleared = grad is None or (was_written and not bool(local(grad).any()))

    def look(self) -> None:
        """Gradients are about to be added to what the watched parameters have."""
        for parameter in self._watched:
            self.note_gradient(parameter)

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: see whether it is one of these parameters'."""
        if self._stepped:
            return
        count, ours = self._steps_ours.get(optimizer, (-1, False))
        now = sum(len(group["params"]) for group in optimizer.param_groups)
        if count != now:
            ours = _steps_some(optimizer, self._ids)
            self._steps_ours[optimizer] = now, ours
        self._stepped = ours

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


class _OnGradient:
    """A hook that holds its watch weakly: a parameter outlives a session."""

    def __init__(self, watch: "weakref.ref[UseWatch]", parameter: Tensor) -> None:
        self._watch = watch
        self._parameter = weakref.ref(parameter)

    def __call__(self, _: Tensor) -> None:
        watch, parameter = self._watch(), self._parameter()
        if watch is not None and parameter is not None:
            watch.note_gradient(parameter)


class AdamAdvice:
    """Logs once, after the first step, that an optimizer of Adam's kin steps on gradients that a scheme makes sparse.

    It costs a call at each optimizer's step, which looks at the first one of each optimizer.
    """

    def __init__(self, scheme: Scheme, parameters: Collection[Tensor]) -> None:
        self._scheme = scheme
        self._ids = {id(parameter) for parameter in parameters}
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._is_given = False
        self._hook = register_optimizer_step_post_hook(_OnStep(self))

    @classmethod
    def where_due(cls, scheme: Scheme, parameters: Collection[Tensor], rank: int) -> "AdamAdvice | None":
        """The advice of rank 0, for a scheme that sends few entries; of low rank and of few bits Adam makes enough."""
        is_sparse = not (scheme.select.sends_all or scheme.select.factors)
        return cls(scheme, parameters) if is_sparse and rank == 0 else None

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, and its state is there to look at."""
        if self._is_given or optimizer in self._known:
            return
        self._known.add(optimizer)
        for group in optimizer.param_groups:
            ours = any(id(parameter) in self._ids for parameter in group["params"])
            is_kin = is_muon(optimizer) or is_adams_kin(optimizer, group)
            text = _advice(self._scheme, optimizer, group) if ours and is_kin else ""
            if text:
                _log.warning(text)
                self._is_given = True
                return

    def close(self) -> None:
        """Take the hook off."""
        self._hook.remove()


def is_muon(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is Muon: torch's, ours, or its inventor's."""
    return "muon" in type(optimizer).__name__.lower()


def is_adams_kin(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether a group has betas, or an optimizer keeps running norms of what it has stepped there."""
    names = (str(name) for parameter in group["params"] for name in optimizer.state.get(parameter, ()))
    return "betas" in group or any(name.startswith(_MOMENTS) for name in names)


def _advice(scheme: Scheme, optimizer: Optimizer, group: dict[str, Any]) -> str:
    """The advice for this optimizer on sparse gradients; see docs/slow.md for the figures."""
    name = type(optimizer).__name__
    if scheme.memory.momentum:  # in the place of Adam's own: the one remedy that worked
        beta = group.get("betas", (0.0,))[0]
        return f"{scheme} carries momentum, and so does {name}; give it betas=(0.0, ...)" if beta else ""
    whole = "maxnorm:bits=4" if is_muon(optimizer) else "lowrank:rank=16"  # a low rank is not for Muon
    return (
        f"{name} learns less from the sparse gradients of {scheme} than from whole ones, since of an entry that waited "
        f"its step keeps little; use the scheme 'streaming' (laconic.follow), or '{whole}' where all ranks must "
        "be equal at every step"
    )


class SteppedBy:
    """Notices which optimizers step on some of these parameters, till it is closed."""

    def __init__(self, parameters: Collection[Tensor]) -> None:
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._ids = {id(parameter) for parameter in parameters}
        self._hook = register_optimizer_step_post_hook(_OnStep(self))

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if optimizer not in self.optimizers and _steps_some(optimizer, self._ids):
            self.optimizers.add(optimizer)

    def close(self) -> None:
        """Take the hook off."""
        self._hook.remove()


def _steps_some(optimizer: Optimizer, ids: Container[int]) -> bool:
    """Return whether an optimizer has parameters of these ids."""
    return any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])


class _OnStep:
    """A hook that holds its watch weakly, as nobody may close it."""

    def __init__(self, watch: UseWatch | AdamAdvice | SteppedBy) -> None:
        self._watch = weakref.ref(watch)

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if (watch := self._watch()) is not None:
            watch.note_step(optimizer)
