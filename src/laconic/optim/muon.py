"""Muon: the step of a matrix is its momentum, orthogonalized; AdamW steps everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from laconic import kernels
from laconic.errors import LaconicError, SchemeError
from laconic.layout import local
from laconic.optim.newton_schulz import orthogonalize
from laconic.optim.shards import exchanged, placed

Split = Callable[[str, nn.Parameter], bool]
MOST_ENTRIES = 1 << 27  # orthogonalized at once: 256 MiB in bfloat16, of which a batch takes about five times as much
_RMS = 0.2  # of AdamW's usual step; so a rate that was tuned for AdamW fits (Liu et al., 2025)


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of hidden layers and AdamW for the rest, as one optimizer.

        m = momentum * m + g
        p <- (1 - lr * weight_decay) p - lr * 0.2 sqrt(max(rows, cols)) * NewtonSchulz(g + momentum * m)

    A parameter of more dimensions is the matrix out x rest. Momentum is float32, also for parameters of 16 bits. The
    shards of an FSDP2 model are exchanged, so that every rank orthogonalizes its share of the matrices, each whole.

    Args:
        params: a model; or named parameters, with `split`; or groups, each with `use_muon` True or False.
        lr: learning rate of matrices; AdamW's, or up to four times as much.
        adamw_lr: learning rate of the rest; None for `lr`.
        weight_decay: decoupled, as AdamW's; of a model's vectors it is 0.
        momentum: of matrices.
        betas, eps: AdamW's.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: type they are computed in; None for bfloat16 on GPUs that have it, and else float32.
        split: from a parameter's name and itself to whether Muon steps it. Without one a model's matrices are Muon's,
            but for those of embeddings and of its last module that has one, the output head.

    Raises:
        SchemeError: if an argument cannot be used; its one line says what to write.

    Example:
        optimizer = laconic.optim.Muon(model, lr=2e-3)
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        *,
        adamw_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        split: Split | None = None,
    ) -> None:
        adamw_lr = lr if adamw_lr is None else adamw_lr
        for name, value, is_right, right in (
            ("lr", lr, lr >= 0, "0 or more"),
            ("adamw_lr", adamw_lr, adamw_lr >= 0, "0 or more"),
            ("weight_decay", weight_decay, weight_decay >= 0, "0 or more"),
            ("momentum", momentum, 0 <= momentum < 1, "a number in [0, 1)"),
            ("betas", betas, all(0 <= beta < 1 for beta in betas), "two numbers in [0, 1)"),
            ("ns_steps", ns_steps, ns_steps >= 1, "1 or more"),
            ("ns_dtype", ns_dtype, ns_dtype != torch.float16, "torch.bfloat16, torch.float32 or None"),
        ):
            if not is_right:
                raise SchemeError(f"Muon's {name} is {value}; give {right}")
        groups = _split_model(params, split) if isinstance(params, nn.Module) else _split_named(list(params), split)
        for group in groups:
            if not group.get("use_muon", True):
                group.setdefault("lr", adamw_lr)
        of_matrices = {"momentum": momentum, "ns_steps": ns_steps, "ns_dtype": ns_dtype}
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, **of_matrices})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which says `use_muon`, after a check of its parameters."""
        if not isinstance(param_group.get("use_muon"), bool):
            raise SchemeError("a group of Muon's needs 'use_muon': True (matrices) or False (AdamW); or give the model")
        super().add_param_group(param_group)
        refusals = (_refusal(p, param_group["use_muon"]) for p in self.param_groups[-1]["params"])
        if refusal := next(filter(None, refusals), None):
            self.param_groups.pop()
            raise SchemeError(refusal)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; momentum stays float32, where torch would cast it to the parameter's type."""
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, p in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(saved_id, {}).get("momentum_buffer")
            if saved is not None and p.dtype != _state_dtype(p):
                self.state[p]["momentum_buffer"] = saved.detach().to(p.device, _state_dtype(p), copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient, and return the closure's loss; sparse gradients are an error."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in params):
                raise LaconicError("Muon takes no sparse gradients; build the embedding with sparse=False")
            if params:
                (self._step_matrices if group["use_muon"] else self._step_others)(group, params)
        return loss

    def _step_others(self, group: dict[str, Any], params: list[Tensor]) -> None:
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            **dict(zip(("beta1", "beta2"), group["betas"], strict=True)),
            **{name: group[name] for name in ("lr", "weight_decay", "eps")},
            amsgrad=False,
            maximize=False,
        )

    def _step_matrices(self, group: dict[str, Any], params: list[Tensor]) -> None:
        lr = float(group["lr"])
        for batch in _batches(params):
            stacks = [self._directions(group, [params[i] for i in members]) for members in batch]
            scales = [-lr * _RMS * math.sqrt(max(_sides(params[members[0]]))) for members in batch]
            flat = orthogonalize([stack.flatten(2) for stack in stacks], steps=group["ns_steps"], scales=scales)
            for members, stack, result in zip(batch, stacks, flat, strict=True):
                updates = exchanged(result.view(stack.shape), params[members[0]], len(members), by_matrix=False)
                kernels.add_decayed_([local(params[i]) for i in members], updates, 1 - lr * group["weight_decay"])

    def _directions(self, group: dict[str, Any], params: list[Tensor]) -> Tensor:
        """Update the momentum of matrices of one shape, and return g + momentum * m of this rank's share of them."""
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, dtype=_state_dtype(p))
        momenta = [local(self.state[p]["momentum_buffer"]) for p in params]
        grads = [local(p.grad) for p in params if p.grad is not None]
        dtype = group["ns_dtype"] or _fast_dtype(params[0].device)
        stack = torch.empty((len(params), *grads[0].shape), dtype=dtype, device=grads[0].device)
        kernels.stack_momentum_(momenta, grads, stack, group["momentum"])  # keeps (1 - momentum) m
        return exchanged(stack, params[0], len(params), by_matrix=True)


def _split_model(model: nn.Module, split: Split | None) -> list[dict[str, Any]]:
    """Return the groups of a model: Muon's matrices, AdamW's, and vectors, which no weight decay keeps small."""
    others: set[int] = set()
    head: list[nn.Parameter] = []
    for module in model.modules():  # tied weights belong to each of their modules
        owned = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
        head = owned or head
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            others.update(map(id, owned))
    others.update(map(id, head))
    rule = split or (lambda _, p: p.ndim >= 2 and id(p) not in others)
    return _split_named(list(model.named_parameters()), rule)


def _split_named(params: list[Any], split: Split | None) -> list[dict[str, Any]]:
    if params and all(isinstance(group, dict) for group in params):
        if split is not None:
            raise SchemeError("these groups say use_muon themselves; leave split out")
        return [dict(group) for group in params]
    if split is None or not all(isinstance(pair, tuple) for pair in params):
        raise SchemeError(
            "parameters alone do not say which are embeddings; give Muon the model, "
            "or model.named_parameters() and split=lambda name, p: ..."
        )
    groups: dict[str, dict[str, Any]] = {
        "matrices": {"params": [], "use_muon": True},
        "others": {"params": [], "use_muon": False},
        "vectors": {"params": [], "use_muon": False, "weight_decay": 0.0},
    }
    seen: set[int] = set()
    for name, p in params:
        if p.requires_grad and id(p) not in seen:
            seen.add(id(p))
            use_muon = split(name, p)
            if use_muon and (refusal := _refusal(p, True)):
                raise SchemeError(f"{name}: {refusal}")
            groups["matrices" if use_muon else "others" if p.ndim >= 2 else "vectors"]["params"].append(p)
    if not (used := [group for group in groups.values() if group["params"]]):
        raise SchemeError("Muon has no parameter to train; all are frozen, or the model has none")
    return used


def _refusal(p: Tensor, use_muon: bool) -> str | None:
    """Return why a parameter cannot be stepped, if it cannot."""
    if not p.is_floating_point():
        return f"Muon steps real numbers, not {p.dtype}; leave this parameter to another optimizer"
    if use_muon and p.ndim < 2:
        return f"a parameter of shape {tuple(p.shape)} is no matrix; put it into a group with use_muon=False"
    if use_muon and sum(placement.is_shard() for placement in getattr(p, "placements", ())) > 1:
        return "this matrix is cut along two axes of a mesh; put it into a group with use_muon=False"
    return None


def _batches(params: Sequence[Tensor]) -> Iterator[list[list[int]]]:
    """Yield indices of parameters: an inner list has one shape, an outer one is orthogonalized at once.

    The matrices of an outer list have one smaller side, and at most MOST_ENTRIES, or are one.
    """
    batches: dict[Any, dict[Any, list[int]]] = {}
    num_entries: dict[Any, int] = {}
    for i, p in enumerate(params):
        key = (min(_sides(p)), p.device)
        if num_entries.get(key, 0) + p.numel() > MOST_ENTRIES and key in batches:
            yield list(batches.pop(key).values())
            num_entries[key] = 0
        batches.setdefault(key, {}).setdefault((p.shape, placed(p)), []).append(i)
        num_entries[key] = num_entries.get(key, 0) + p.numel()
    yield from (list(batch.values()) for batch in batches.values())


def _sides(p: Tensor) -> tuple[int, int]:
    rows = max(1, p.shape[0])
    return rows, p.numel() // rows


def _state_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _fast_dtype(device: torch.device) -> torch.dtype:
    """Return the type of the products: bfloat16 where tensor cores take it, which are NVIDIA's from Ampere on."""
    is_fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if is_fast else torch.float32
