"""Muon and AdamW as one optimizer: what each steps, how, and that it learns."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.optim import Muon, muon
from laconic.optim.newton_schulz import orthogonalize
from tests.workers import WorkerPool

SHAPES = ((1, 7), (7, 1), (1, 1), (16, 16), (16, 24), (33, 8), (8, 65))


def _values(matrices: Tensor) -> Tensor:
    values: Tensor = torch.linalg.svdvals(matrices.float())
    return values


def _step(params: list[nn.Parameter], seed: int) -> None:
    """Give every parameter a gradient of its own."""
    draw = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)


def _copies(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    twin = copy.deepcopy(model)
    return twin, list(twin.parameters())


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(11, 12),
        nn.Linear(12, 48),
        nn.LayerNorm(48),
        nn.Linear(48, 12),
        nn.Linear(12, 12),
        nn.Linear(12, 5),
    )


# Newton-Schulz


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_about_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # A Gaussian square matrix has singular values near zero, which five steps only begin to raise: give it a spectrum.
    u, _, v = torch.linalg.svd(torch.randn(6, *shape), full_matrices=False)
    given = (u * torch.linspace(1, 0.1, min(shape))) @ v
    (result,) = orthogonalize([1e-3 * given.to(dtype)])
    assert result.shape == given.shape and result.dtype == dtype
    values = _values(result)
    assert values.min() > 0.65 and values.max() < 1.25  # the polynomial's own range is 0.68 to 1.20
    angles = torch.cosine_similarity(result.float().flatten(1), (u @ v).flatten(1))
    assert angles.min() > 0.97


def test_zeros_stay_zeros_and_nan_stays_nan() -> None:
    given = torch.zeros(3, 4, 9)
    given[2, 0, 0] = torch.nan
    (result,) = orthogonalize([given])
    assert torch.equal(result[:2], given[:2]) and result[2].isnan().any()


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    given = torch.randn(2, 8, 20)
    torch.testing.assert_close(orthogonalize([size * given])[0], orthogonalize([given])[0], rtol=1e-3, atol=1e-4)


def test_a_batch_is_its_matrices_one_by_one() -> None:
    torch.manual_seed(1)
    stacks = [torch.randn(3, 16, 40), torch.randn(2, 40, 16), torch.randn(1, 16, 64)]
    together = orthogonalize(stacks, scales=[1.0, 2.0, 3.0])
    for stack, result, scale in zip(stacks, together, (1.0, 2.0, 3.0), strict=True):
        alone = torch.cat([orthogonalize([matrix[None]], scales=[scale])[0] for matrix in stack])
        torch.testing.assert_close(result, alone, rtol=1e-4, atol=1e-5)  # a product of another batch may round anew


def test_tall_is_wide_transposed_and_pairs_are_single_steps() -> None:
    given = torch.randn(2, 8, 30)
    (wide,), (tall,) = orthogonalize([given]), orthogonalize([given.mT.contiguous()])
    torch.testing.assert_close(tall.mT, wide, rtol=1e-4, atol=1e-5)
    x = given / given.flatten(1).norm(dim=1)[:, None, None]
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    torch.testing.assert_close(wide, x, rtol=1e-4, atol=1e-5)


# Who steps what


def test_hidden_matrices_are_muons() -> None:
    model = _net()
    matrices, others, vectors = Muon(model).param_groups
    assert [tuple(p.shape) for p in matrices["params"]] == [(48, 12), (12, 48), (12, 12)]
    assert [tuple(p.shape) for p in others["params"]] == [(11, 12), (5, 12)]
    assert all(p.ndim == 1 for p in vectors["params"]) and len(vectors["params"]) == 6
    assert (matrices["use_muon"], others["use_muon"], vectors["use_muon"]) == (True, False, False)
    assert (matrices["weight_decay"], others["weight_decay"], vectors["weight_decay"]) == (0.1, 0.1, 0.0)


def test_tied_weights_are_stepped_once_and_frozen_ones_never() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(9, 6), "body": nn.Linear(6, 6), "more": nn.Linear(6, 6)})
    model["lm_head"] = nn.Linear(6, 9, bias=False)
    model["lm_head"].weight = model["wte"].weight
    model["more"].weight.requires_grad_(False)
    for params in (model, model.named_parameters(remove_duplicate=False)):
        by_name = None if isinstance(params, nn.Module) else lambda name, p: "body" in name and p.ndim == 2
        matrices, others, vectors = Muon(params, split=by_name).param_groups
        assert matrices["params"] == [model["body"].weight]
        assert others["params"] == [model["wte"].weight]
        assert len(vectors["params"]) == 2


def test_a_split_of_ones_own() -> None:
    model = _net()
    groups = Muon(model, split=lambda name, _: name == "4.weight", lr=0.1, adamw_lr=0.01).param_groups
    assert [g["lr"] for g in groups] == [0.1, 0.01, 0.01]
    assert len(groups[0]["params"]) == 1 and groups[0]["params"][0] is model.get_parameter("4.weight")


LINEAR = nn.Linear(3, 4)


@pytest.mark.parametrize(
    "make, cure",
    [
        (lambda: Muon(LINEAR, split=lambda *_: True), "bias: a parameter of shape (4,) is no matrix; put it into a"),
        (lambda: Muon([{"params": [LINEAR.bias], "use_muon": True}]), "put it into a group with use_muon=False"),
        (lambda: Muon([{"params": [LINEAR.bias]}]), "needs 'use_muon': True (matrices) or False (AdamW)"),
        (lambda: Muon(LINEAR.parameters()), "give Muon the model"),
        (lambda: Muon(LINEAR.named_parameters()), "split=lambda name, p: ..."),
        (lambda: Muon([{"params": [LINEAR.bias], "use_muon": False}], split=lambda *_: True), "leave split out"),
        (lambda: Muon(nn.Linear(2, 2, dtype=torch.complex64)), "leave this parameter to another optimizer"),
        (lambda: Muon(nn.Identity()), "no parameter to train"),
        (lambda: Muon(LINEAR, lr=-1.0), "Muon's lr is -1.0; give 0 or more"),
        (lambda: Muon(LINEAR, momentum=1.0), "give a number in [0, 1)"),
        (lambda: Muon(LINEAR, ns_dtype=torch.float16), "give torch.bfloat16, torch.float32 or None"),
    ],
)
def test_wrong_use_is_one_line_with_the_cure(make: Callable[[], object], cure: str) -> None:
    with pytest.raises(laconic.SchemeError) as caught:
        make()
    assert cure in str(caught.value) and "\n" not in str(caught.value)


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(laconic.LaconicError, match="build the embedding with sparse=False"):
        Muon(embedding).step()


# The step


def test_a_step_is_the_equation() -> None:
    p = nn.Parameter(torch.randn(6, 20))
    optimizer = Muon([{"params": [p], "use_muon": True}], lr=0.1, weight_decay=0.5)
    expected, m = p.detach().clone(), torch.zeros_like(p)
    for seed in range(4):
        _step([p], seed)
        assert p.grad is not None
        m = 0.95 * m + p.grad
        (o,) = orthogonalize([(p.grad + 0.95 * m)[None]])
        expected = (1 - 0.1 * 0.5) * expected - 0.1 * 0.2 * 20**0.5 * o[0]
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-5)  # float32, after a product's roundings


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has a Muon from 2.9 on")
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
def test_a_step_is_torchs(shape: tuple[int, int]) -> None:
    mine, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}
    one = Muon([{"params": [mine], "use_muon": True}], ns_dtype=torch.bfloat16, **options)
    other: Any = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options)
    for seed in range(3):
        _step([mine], seed)
        _step([theirs], seed)
        one.step()
        other.step()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-3)  # bfloat16: a tenth of three steps of rms 0.002 each
    steps = [(p.detach() - 0.999**3).flatten() for p in (mine, theirs)]
    assert torch.cosine_similarity(steps[0], steps[1], dim=0) > 0.995


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rest_is_adamw_bit_for_bit(dtype: torch.dtype) -> None:
    model = _net().to(dtype)
    twin, twins = _copies(model)
    options: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    one = Muon([{"params": list(model.parameters()), "use_muon": False}], **options)
    other = torch.optim.AdamW(twins, **options)
    for seed in range(4):
        _step(list(model.parameters()), seed)
        _step(twins, seed)
        one.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_convolution_is_the_matrix_out_x_rest() -> None:
    conv = nn.Conv2d(3, 8, 3, bias=False)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    flat = nn.Parameter(conv.weight.detach().flatten(1).clone())
    both = Muon([{"params": [conv.weight, flat], "use_muon": True}], lr=0.1)
    _step([flat], 0)
    assert flat.grad is not None
    conv.weight.grad = flat.grad.view(8, 3, 3, 3).clone()
    both.step()
    torch.testing.assert_close(conv.weight.flatten(1), flat, rtol=1e-4, atol=1e-5)  # in another batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_follow_thirty_two(dtype: torch.dtype) -> None:
    half, whole = (nn.Parameter(torch.ones(8, 24, dtype=d)) for d in (dtype, torch.float32))
    optimizers = [Muon([{"params": [p], "use_muon": True}], lr=0.05) for p in (half, whole)]
    for seed in range(5):
        _step([half], seed)
        assert half.grad is not None
        whole.grad = half.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(half.float(), whole, rtol=0, atol=0.02)  # five roundings of 1/256 at one
    assert optimizers[0].state[half]["momentum_buffer"].dtype == torch.float32
    again = Muon([{"params": [half], "use_muon": True}])
    again.load_state_dict(optimizers[0].state_dict())
    assert torch.equal(again.state[half]["momentum_buffer"], optimizers[1].state[whole]["momentum_buffer"])


def test_more_than_fits_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[nn.Linear(8, 24) for _ in range(5)], nn.Linear(24, 8), nn.Linear(8, 8), nn.Linear(2, 2))
    twin, twins = _copies(model)
    one, other = Muon(model), Muon(twin)
    _step(list(model.parameters()), 0)
    _step(twins, 0)
    one.step()
    monkeypatch.setattr(muon, "MOST_ENTRIES", 400)
    sizes: list[int] = []

    def noted(stacks: Sequence[Tensor], **options: Any) -> list[Tensor]:
        sizes.append(sum(stack.numel() for stack in stacks))
        return orthogonalize(stacks, **options)

    monkeypatch.setattr(muon, "orthogonalize", noted)
    other.step()
    assert len(sizes) > 1 and max(sizes) <= 400
    for p, q in zip(model.parameters(), twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


# An optimizer like others


def _train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        _step(params, seed)
        optimizer.step()


@pytest.mark.parametrize("how", ["saved", "pickled"])
def test_resumed_is_never_stopped(how: str, tmp_path: Any) -> None:
    model = _net()
    optimizer = Muon(model)
    _train(optimizer, list(model.parameters()), range(3))
    twin, twins = _copies(model)
    if how == "pickled":
        again = pickle.loads(pickle.dumps(optimizer))
        twins = [p for g in again.param_groups for p in g["params"]]
        params = [p for g in optimizer.param_groups for p in g["params"]]
    else:
        torch.save(optimizer.state_dict(), tmp_path / "state")
        again = Muon(twin, lr=0.5)
        again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        params = list(model.parameters())
    _train(optimizer, params, range(3, 6))
    _train(again, twins, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def test_schedulers_scale_every_group() -> None:
    optimizer = Muon(_net(), lr=0.4, adamw_lr=0.2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1, 0.1]


def test_without_a_rate_nothing_moves_and_without_a_gradient_no_state_is_made() -> None:
    model = _net()
    twin, _ = _copies(model)
    optimizer = Muon(model, lr=0.0)
    _train(optimizer, list(model.parameters()), range(1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    fresh = Muon(model)
    fresh.step()
    assert not fresh.state


def test_a_closure_gives_the_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = Muon(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(1, 4)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(3)]
    assert losses[0] > losses[-1]


def test_a_grad_scaler_skips_what_is_not_finite_and_alone_it_passes_on() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = Muon(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before, _ = _copies(model)
    for factor in (torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True)]
        assert all(moved) if factor == 1.0 else not any(moved)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert all(p.isnan().all() for p in model.parameters())


def test_a_compiled_model_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = Muon(compiled)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 2]
    before, _ = _copies(model)
    compiled(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.get_parameter("0.weight"), before.get_parameter("0.weight"))


# Shards


class Sharded:
    """A model, whole or in shards over all ranks, and gradients that come from one batch."""

    def __init__(self, whole: bool) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(
            *[nn.Linear(9, 9) for _ in range(3)], nn.Linear(9, 33), nn.Linear(33, 9), nn.Linear(9, 2)
        )
        if not whole:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = Muon(self.model, lr=0.02)

    def steps(self, seeds: range) -> list[Tensor]:
        for seed in seeds:
            self.optimizer.zero_grad()
            x = torch.randn(6, 9, generator=torch.Generator().manual_seed(seed))
            self.model(x).square().mean().backward()
            self.optimizer.step()
        return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters()]


def _in_shards() -> tuple[list[Tensor], bool]:
    run = Sharded(whole=False)
    run.steps(range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer))
    weights = copy.deepcopy(run.model.state_dict())
    weights_after = [p.detach().clone() for p in run.steps(range(3, 5))]
    other = Sharded(whole=False)
    other.model.load_state_dict(weights)
    set_optimizer_state_dict(other.model, other.optimizer, saved)
    resumed = other.steps(range(3, 5))
    return weights_after, all(torch.equal(p, q) for p, q in zip(weights_after, resumed, strict=True))


def test_shards_are_stepped_as_whole_matrices(two_workers: WorkerPool) -> None:
    """Also rows that two ranks cannot divide evenly, and three matrices of one shape for two ranks."""
    whole = Sharded(whole=True).steps(range(5))
    for weights, resumed in two_workers.run(_in_shards):
        assert resumed
        for p, q in zip(whole, weights, strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-4, atol=1e-5)  # products of other batches round anew


# It learns


class Block(nn.Module):
    """One layer of a GPT, with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.projection(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        result: Tensor = x + self.down(torch.relu(self.up(self.norms[1](x))))
        return result


def _loss(make: Callable[[nn.Module], torch.optim.Optimizer]) -> float:
    """Return the mean loss of the last ten of 60 steps on the characters of this file."""
    torch.manual_seed(0)
    known, tokens = torch.tensor(list(Path(__file__).read_bytes())).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    vocabulary = len(known)
    model = nn.Sequential(
        nn.Embedding(vocabulary, 32), Block(32), Block(32), nn.LayerNorm(32), nn.Linear(32, vocabulary)
    )
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6) * (1 - step / 60))
    losses = []
    for _ in range(60):
        batch = tokens[torch.randint(len(tokens) - 33, (16, 1)) + torch.arange(33)]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / 10


@pytest.mark.slow  # trains a character model six times: a minute
def test_it_learns_more_than_adamw_at_the_best_rate_of_each() -> None:
    muons = [_loss(lambda model, lr=lr: Muon(model, lr=lr)) for lr in (1e-2, 2e-2, 4e-2)]  # type: ignore[misc]
    adamws = [
        _loss(lambda model, lr=lr: torch.optim.AdamW(model.parameters(), lr=lr))  # type: ignore[misc]
        for lr in (1e-2, 3e-2, 6e-2)
    ]
    assert min(muons) < min(adamws) - 0.05, (muons, adamws)
