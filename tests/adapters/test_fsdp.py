"""FSDP2 inside a node, laconic between nodes: two nodes of two real processes each, over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

import laconic
from laconic.adapters.fsdp import units_of
from laconic.layout import local
from laconic.paths import bytes_out
from tests.logs import logged
from tests.workers import DEVICES, NO_GPU, WorkerPool, equal_everywhere, run_script


class Spoiled(torch.autograd.Function):
    """The same, but for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, torch.inf)


class Net(nn.Module):
    """Rows that two shards cannot divide evenly, a parameter of one entry, and some that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Linear(9, 33)
        self.middle = nn.Linear(33, 65)
        self.spare = nn.Linear(65, 65)
        self.head = nn.Linear(65, 4)
        self.offset = nn.Parameter(torch.zeros(65))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, uses_spare: bool = True, uses_offset: bool = True, spoils: bool = False) -> Tensor:
        x = torch.relu(self.middle(torch.relu(self.body(x))))
        x = x + self.spare(x) if uses_spare else x
        x = x + self.offset if uses_offset else x
        scale = Spoiled.apply(self.scale) if spoils else self.scale  # type: ignore[no-untyped-call]
        result: Tensor = scale * self.head(x)
        return result


class OverHost:
    """What FSDP2 shards and reduces on a GPU, by way of the host: Gloo reads a CUDA tensor as if it lay there."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatherOverHost(OverHost, AllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        gathered = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.all_gather_into_tensor(gathered, input_tensor.cpu(), group=group)
        output_tensor.copy_(gathered)


class ReduceOverHost(OverHost, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        reduced = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.reduce_scatter_tensor(reduced, input_tensor.cpu(), op=op, group=group)
        output_tensor.copy_(reduced)


class Run:
    """A model in shards over this rank's node, and its optimizer; a whole one trains alone, on what all ranks have."""

    def __init__(self, *, whole: bool = False, freezes: bool = False, device: str = "cpu", **options: Any) -> None:
        self.device = device
        self.model: Any = Net().to(device)
        self.model.middle.weight.requires_grad_(not freezes)
        self.rows = slice(0, 16)
        if not whole:
            self.rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
            self.mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
            units: list[Any] = [self.model.body, self.model.middle, self.model.spare, self.model]
            for module in units:
                fully_shard(module, mesh=self.mesh["shard"], **options)
                if device == "cuda":
                    module.set_custom_all_gather(GatherOverHost())
                    module.set_custom_reduce_scatter(ReduceOverHost())
                    module.set_force_sum_reduction_for_comms(True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5)

    @property
    def replicas(self) -> Any:
        return self.mesh.get_group("replicate")

    def loss(self, number: int, **used: bool) -> Tensor:
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(16, 9, generator=draw)
        y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        x, y = (each[self.rows].to(self.device) for each in (x, y))
        return nn.functional.cross_entropy(self.model(x, **used), y)

    def step(self, number: int, **used: bool) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(number, **used)
        _backward(loss)
        self.optimizer.step()
        return float(loss.detach())

    def weights(self) -> Tensor:
        """The whole model, as this rank's node has it."""
        return torch.cat([_whole(p.detach()).reshape(-1) for p in self.model.parameters()])


def _whole(tensor: Any) -> Tensor:
    on_host: Any = tensor.cpu()
    whole: Tensor = on_host.full_tensor() if isinstance(on_host, DTensor) else on_host
    return whole


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _mean(results: list[dict[str, Any]], what: str) -> float:
    return float(sum(result[what] for result in results) / len(results))


def _divided_by(factor: float | None, reduce_dtype: torch.dtype | None) -> Tensor:
    run = Run(mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    if factor is not None:
        for module in run.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)  # Gloo cannot divide by it on the way
    laconic.attach(run.model, "dense", group=run.replicas)
    for number in range(4):
        run.step(number)
    return run.weights()


@pytest.mark.parametrize(
    "factor, reduce_dtype, tolerance",
    [
        (None, None, 1e-6),  # one float32 rounding
        (4.0, None, 1e-6),
        (None, torch.float16, 2e-3),  # which FSDP2 divides before and after
    ],
)
def test_dense_is_training_on_one_machine(
    fresh_workers: WorkerPool, factor: float | None, reduce_dtype: torch.dtype | None, tolerance: float
) -> None:
    alone = Run(whole=True)
    for number in range(4):
        alone.step(number)
    for weights in fresh_workers.run(_divided_by, factor, reduce_dtype):
        torch.testing.assert_close(weights, alone.weights(), atol=tolerance, rtol=tolerance)


def _left_out(used: dict[str, bool], freezes: bool) -> Tensor:
    run = Run(freezes=freezes)
    laconic.attach(run.model, "dense", group=run.replicas)
    for number in range(3):
        run.step(number, **used)
    return run.weights()


@pytest.mark.parametrize(
    "used, freezes",
    [
        ({"uses_spare": False}, False),
        ({"uses_offset": False}, False),
        ({"uses_spare": False, "uses_offset": False}, True),
    ],
    ids=["a module", "a parameter of a module", "both, and one is frozen"],
)
def test_what_gets_no_gradient_is_left_out(fresh_workers: WorkerPool, used: dict[str, bool], freezes: bool) -> None:
    alone = Run(whole=True, freezes=freezes)
    for number in range(3):
        alone.step(number, **used)
    for weights in fresh_workers.run(_left_out, used, freezes):
        torch.testing.assert_close(weights, alone.weights(), atol=1e-6, rtol=1e-6)  # one float32 rounding


def _trained(text: str, steps: int, device: str = "cpu") -> dict[str, Any]:
    run = Run(device=device)
    units, _ = units_of(run.model)
    layouts = [unit.trained for unit in units]
    session = laconic.attach(run.model, text, group=run.replicas)
    losses = [run.step(number) for number in range(steps)]
    stats = session.stats()
    scheme = laconic.parse(text)
    assert isinstance(scheme, laconic.Scheme)
    return {
        "first": losses[0],
        "last": sum(losses[-8:]) / 8,
        "equal": equal_everywhere(run.weights()),
        "steps": stats.steps,
        "units": len(layouts),
        "bytes_out": stats.bytes_out,
        "foretold": steps * sum(bytes_out(scheme, layout, 2) for layout in layouts),
        "padded": sum(layout.num_entries for layout in layouts),
    }


@pytest.fixture(scope="module")
def control(fresh_workers: WorkerPool) -> list[dict[str, Any]]:
    return fresh_workers.run(_trained, "bf16", 30)


@pytest.mark.parametrize("text", ["topk:rho=0.05", "maxnorm", pytest.param("lowrank", marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", DEVICES)
def test_shards_meet_their_replicas(
    fresh_workers: WorkerPool, control: list[dict[str, Any]], device: str, text: str
) -> None:
    """Loss as with bf16, replicas equal bit for bit, and as many bytes as its scheme foretells."""
    results = fresh_workers.run(_trained, text, 30, device)
    assert _mean(results, "last") < 1.1 * _mean(control, "last") < 0.8 * _mean(control, "first")
    for plain, result in zip(control, results, strict=True):
        assert plain["equal"] and result["equal"]
        assert result["steps"] == 30 and result["units"] == 4
        assert result["bytes_out"] == result["foretold"] < 0.6 * plain["bytes_out"]
        assert plain["bytes_out"] == 30 * 2 * plain["padded"]  # between two each sends all that it has


def _accumulated(how: str) -> dict[str, Any]:
    run = Run()
    session = laconic.attach(run.model, "dense", group=run.replicas)
    for step in range(3):
        run.optimizer.zero_grad()
        for micro, number in enumerate((2 * step, 2 * step + 1)):
            is_last = micro == 1
            if how == "sync":
                run.model.set_requires_gradient_sync(is_last)
            elif how == "all-reduce":
                run.model.set_requires_all_reduce(is_last)
            elif how == "backward":
                run.model.set_is_last_backward(is_last)
            _backward(run.loss(number) / 2)
        run.optimizer.step()
    return {"weights": run.weights(), "steps": session.stats().steps}


@pytest.mark.parametrize("how", ["sync", "all-reduce", "backward", "every"])
def test_accumulated_gradients_go_once_a_step(fresh_workers: WorkerPool, how: str) -> None:
    alone = Run(whole=True)
    for step in range(3):
        alone.optimizer.zero_grad()
        _backward((alone.loss(2 * step) + alone.loss(2 * step + 1)) / 2)
        alone.optimizer.step()
    for result in fresh_workers.run(_accumulated, how):
        assert result["steps"] == (6 if how == "every" else 3)
        torch.testing.assert_close(result["weights"], alone.weights(), atol=1e-6, rtol=1e-6)  # one float32 rounding


def _one_shard_a_node(text: str) -> dict[str, Any]:
    """Each node is one process, which NCCL serves, as it cannot several of one GPU; replicas meet over Gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([each], backend="nccl") for each in range(size)]
    replicas = dist.new_group(list(range(size)), backend="gloo")
    mesh = DeviceMesh.from_group(groups[rank], "cuda", mesh=[rank])
    run = Run(whole=True, device="cuda")
    run.rows = slice(4 * rank, 4 * rank + 4)
    for module in (run.model.body, run.model):
        fully_shard(module, mesh=mesh)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.2, momentum=0.5)
    laconic.attach(run.model, text, group=replicas)
    losses = [run.step(number) for number in range(30)]
    weights = torch.cat([local(p).detach().reshape(-1).cpu() for p in run.model.parameters()])
    return {"first": losses[0], "last": sum(losses[-8:]) / 8, "equal": equal_everywhere(weights)}


@NO_GPU
@pytest.mark.parametrize("text", ["bf16", "topk:rho=0.05"])
def test_shards_over_nccl(fresh_workers: WorkerPool, text: str) -> None:
    for result in (results := fresh_workers.run(_one_shard_a_node, text)):
        assert result["equal"] and _mean(results, "last") < 0.8 * _mean(results, "first")


def _first_micro_batch_alone() -> str:
    run = Run()
    laconic.attach(run.model, "dense", group=run.replicas)
    run.model.set_requires_all_reduce(False)
    _backward(run.loss(0))
    run.model.set_requires_all_reduce(True)
    try:
        _backward(run.loss(1, uses_spare=False))
    except laconic.LaconicError as error:
        return str(error)
    return "nobody noticed"


def test_a_gradient_of_the_first_micro_batch_alone_is_not_lost_in_silence(fresh_workers: WorkerPool) -> None:
    for said in fresh_workers.run(_first_micro_batch_alone):
        assert "'spare.bias' got a gradient in the first micro-batches alone" in said


def _kept(session: laconic.Attached) -> Tensor:
    kept = session.state_dict()["memory"]["residual"]
    return torch.cat([torch.zeros(0), *(each.cpu() for each in kept.values())])


def _overflow(scales: bool, device: str) -> dict[str, Any]:
    """Rank 3 sees an Inf in a parameter of which the first shard alone has entries: ranks 0 and 2 hear of it."""
    run = Run(device=device)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=100)
    session = laconic.attach(run.model, "topk:rho=0.05", group=run.replicas, grad_scaler=scaler if scales else None)
    found: list[bool] = []
    for number in range(6):
        run.optimizer.zero_grad()
        before = _kept(session)
        loss = run.loss(number, spoils=number == 3 and dist.get_rank() == 3)
        _backward(scaler.scale(loss) if scales else loss)
        if number == 3:
            after = _kept(session)
            found = [session.last_step_finite, torch.equal(before, after), bool(after.isfinite().all())]
        if scales:
            scaler.step(run.optimizer)
            scaler.update()
        elif session.last_step_finite:
            run.optimizer.step()
    return {
        "found": found,
        "finite": bool(run.weights().isfinite().all()),
        "equal": equal_everywhere(run.weights()),
        "skipped": session.stats().skipped_steps,
        "scale": scaler.get_scale(),
    }


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_an_overflow_in_one_shard_is_one_of_all(fresh_workers: WorkerPool, device: str, scales: bool) -> None:
    for result in fresh_workers.run(_overflow, scales, device):
        # With a GradScaler, which skips the step, what is kept is as before it, in shards that were finite too.
        assert result["found"] == [False, scales, True]
        assert result["finite"] and result["equal"] and result["skipped"] == 1
        assert result["scale"] == (4.0 if scales else 8.0)


def _rounds(text: str, steps: int, whole: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Outer steps between two nodes; where the model is whole each process has all of it, and its node's data."""
    run = Run(whole=whole, device=device)
    if whole:
        node = dist.get_rank() // 2
        run.rows = slice(8 * node, 8 * node + 8)
    group = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard")).get_group("replicate")
    follower = laconic.follow(run.model, run.optimizer, text, group=group)
    assert isinstance(follower, laconic.Follower)
    losses = []
    for number in range(steps):
        losses.append(run.step(number))
        follower.step()
    follower.settle()
    drifted = not equal_everywhere(run.weights())
    weights = run.weights()
    follower.average_()
    return {
        "first": losses[0],
        "last": sum(losses[-8:]) / 8,
        "drifted": drifted,
        "equal": equal_everywhere(run.weights()),
        "turns": follower.stats().rounds,
        "bytes_out": follower.stats().bytes_out,
        "weights": weights,
    }


@pytest.mark.parametrize("text", ["local:every=5", "streaming:every=6,fragments=2,delay=1"])
@pytest.mark.parametrize("device", DEVICES)
def test_outer_steps_between_replicas(
    fresh_workers: WorkerPool, control: list[dict[str, Any]], device: str, text: str
) -> None:
    results = fresh_workers.run(_rounds, text, 32, False, device)
    # Five rounds of streaming are few: its outer momentum has only begun to carry it.
    bound = 1.15 * _mean(control, "last") if "local" in text else 0.9 * _mean(results, "first")
    assert _mean(results, "last") < bound
    for plain, result in zip(control, results, strict=True):
        assert result["drifted"] and result["equal"]
        assert result["turns"] == (6 if "local" in text else 10)
        assert result["bytes_out"] < 0.5 * plain["bytes_out"]


@pytest.mark.parametrize("text", ["local:every=1,quantize=none", "local:every=3,quantize=none,fragments=2,delay=1"])
def test_outer_steps_of_shards_are_those_of_whole_models(fresh_workers: WorkerPool, text: str) -> None:
    whole = fresh_workers.run(_rounds, text, 8, True)
    for one, other in zip(whole, fresh_workers.run(_rounds, text, 8), strict=True):
        torch.testing.assert_close(other["weights"], one["weights"], atol=1e-5, rtol=1e-5)  # roundings of 8 steps


class Resuming:
    """A run that goes through checkpoints of torch.distributed; models that drift are saved by each node."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.run = Run()
        self.mine: Any = (
            laconic.follow(
                self.run.model, self.run.optimizer, "streaming:every=4,fragments=2,delay=1", group=self.run.replicas
            )
            if how == "follower"
            else laconic.attach(self.run.model, "topk:rho=0.05", group=self.run.replicas)
        )

    def steps(self, numbers: range) -> None:
        for number in numbers:
            self.run.step(number)
            if self.how == "follower":
                self.mine.step()

    def whole(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.run.model, self.run.optimizer)
        state = {"model": model, "optimizer": optimizer}
        return state if self.how == "gathered" else {**state, "laconic": laconic.PerRankState(self.mine)}

    def where(self, folder: str) -> dict[str, Any]:
        if self.how != "follower":
            return {"checkpoint_id": folder}
        node = self.run.mesh.get_local_rank("replicate")
        return {"checkpoint_id": f"{folder}/{node}", "process_group": self.run.mesh.get_group("shard")}

    def load(self, folder: str, gathered: Any) -> None:
        state = self.whole()
        dcp.load(state, **self.where(folder))
        set_state_dict(
            self.run.model, self.run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        if self.how == "gathered":
            self.mine.scatter_state(gathered)


def _resumed(folder: str, how: str) -> tuple[Tensor, Tensor]:
    """(nine steps in one go, four of them after a resume)."""
    undisturbed = Resuming(how)
    undisturbed.steps(range(9))
    first = Resuming(how)
    first.steps(range(5))
    dcp.save(first.whole(), **first.where(folder))
    gathered = first.mine.gather_state()
    assert (gathered is not None) == (dist.get_rank() == 0)
    second = Resuming(how)
    second.load(folder, gathered)
    second.steps(range(5, 9))
    return undisturbed.run.weights(), second.run.weights()


@pytest.mark.parametrize("how", ["dcp", "gathered", "follower"])
def test_checkpoints_of_torch_distributed(fresh_workers: WorkerPool, tmp_path: Path, how: str) -> None:
    for undisturbed, resumed in fresh_workers.run(_resumed, str(tmp_path), how):
        assert torch.equal(undisturbed, resumed)


def _another_shards_state() -> str:
    run = Run()
    session = laconic.attach(run.model, "topk:rho=0.05", group=run.replicas)
    run.step(0)
    state = session.state_dict()
    with pytest.raises(laconic.StateError) as refused:
        session.load_state_dict({**state, "shard": 1 - state["shard"]})
    return str(refused.value)


def test_a_state_of_another_shard_is_refused(fresh_workers: WorkerPool) -> None:
    assert "none of these states is of shard 0 of 2" in fresh_workers.run(_another_shards_state)[0]


def _after_close(text: str) -> tuple[bool, bool]:
    """(whether replicas go apart once nobody exchanges, whether another session brings them to the same updates)."""
    run = Run()
    session = laconic.attach(run.model, "topk:rho=0.05", group=run.replicas)
    run.step(0)
    session.close()
    run.step(1)
    apart = not equal_everywhere(run.weights())
    other = laconic.attach(run.model, text, group=run.replicas)  # which lets replicas begin alike
    run.step(2)
    with pytest.raises(laconic.StateError, match="a step can be taken back if attach\\(\\) is given unused_steps="):
        other.discard_()
    other.close()
    return apart, other.last_step_finite


@pytest.mark.parametrize("text", ["dense", "topk:rho=0.1", "maxnorm:bits=4"])
def test_a_closed_session_gives_the_model_back(fresh_workers: WorkerPool, text: str) -> None:
    assert fresh_workers.run(_after_close, text) == [(True, True)] * 4


def _thrown_away(how: str) -> tuple[Tensor, list[str]]:
    """The weights after four steps, before some of which gradients are made that nobody uses, and what was logged."""
    run = Run()
    session = laconic.attach(
        run.model, "topk:rho=0.05", group=run.replicas, unused_steps="warn" if how == "warned" else "discard"
    )
    with logged() as lines:
        for number in range(4):
            if how != "none" and number in (1, 2):
                _backward(run.loss(100 + number))
                if how == "by hand":
                    session.discard_()
            run.step(number)
    return run.weights(), [line for line in lines if "no optimizer had used" in line]


def test_steps_that_nobody_uses_are_taken_back(fresh_workers: WorkerPool) -> None:
    plain = fresh_workers.run(_thrown_away, "none")
    for how in ("by hand", "by itself"):
        for (want, _), (got, lines) in zip(plain, fresh_workers.run(_thrown_away, how), strict=True):
            assert torch.equal(want, got) and not lines
    warned = fresh_workers.run(_thrown_away, "warned")
    assert [len(lines) for _, lines in warned] == [1, 0, 0, 0]
    assert not torch.equal(warned[0][0], plain[0][0])


def _one_shard_takes_back() -> str:
    run = Run()
    session = laconic.attach(run.model, "topk:rho=0.05", group=run.replicas, unused_steps="discard")
    run.step(0)
    if dist.get_rank() % 2:
        session.discard_()
    try:
        run.step(1)
    except laconic.LaconicError as error:
        return str(error)
    return "nobody noticed"


def test_a_step_that_some_shards_take_back_is_an_error_on_all(fresh_workers: WorkerPool) -> None:
    assert all("let all ranks do so" in line for line in fresh_workers.run(_one_shard_takes_back))


def _begun_apart(on_mismatch: Any) -> tuple[bool, bool, str]:
    run = Run()
    with torch.no_grad():
        run.model.body.weight.mul_(1.0 + dist.get_rank() // 2)  # another one on the second node
    laconic.attach(run.model, "dense", group=run.replicas, on_mismatch=on_mismatch, check_replicas_every=2)
    alike = equal_everywhere(run.weights())
    run.step(0)
    if dist.get_rank() == 3:
        with torch.no_grad():
            local(run.model.middle.weight).add_(1.0)
    said = ""
    with logged():
        try:
            run.step(1)
        except laconic.LaconicError as error:
            said = str(error)
    return alike, equal_everywhere(run.weights()), said


def test_replicas_begin_alike_and_are_watched(fresh_workers: WorkerPool) -> None:
    for alike, healed, said in fresh_workers.run(_begun_apart, "heal"):
        assert alike and healed and not said
    told = [said for _, _, said in fresh_workers.run(_begun_apart, "error")]
    assert ["'middle.weight'" in said for said in told] == [False, True, False, True]


def _refusals() -> list[str]:
    run = Run()
    model, group = run.model, run.replicas
    everyone = Net()
    for module in (everyone.body, everyone):
        fully_shard(module, mesh=run.mesh)
    part = Net()
    fully_shard(part.body, mesh=run.mesh["shard"])
    attempts: list[Any] = [
        lambda: laconic.attach(model, "dense"),
        lambda: laconic.attach(model, "dense", group=run.mesh.get_group("shard")),
        lambda: laconic.attach(everyone, "dense", group=group),
        lambda: laconic.attach(part.body, "torch-fp16", group=group),
        lambda: laconic.attach(model, "dense", group=group, pipeline=True),
        lambda: laconic.follow(model, run.optimizer, "local"),
        lambda: laconic.follow(model, run.optimizer, "gossip", group=group),
        lambda: [laconic.attach(model, "dense", group=group) for _ in range(2)],
    ]
    said = []
    for attempt in attempts:
        try:
            attempt()
            said.append("nobody noticed")
        except laconic.SchemeError as error:
            said.append(str(error))
    return said


def test_wrong_use_is_one_line_with_the_cure(fresh_workers: WorkerPool) -> None:
    wanted = [
        "group=mesh.get_group('replicate')",
        "write fully_shard(..., mesh=mesh['shard'])",
        "write fully_shard(..., mesh=mesh['shard'])",
        "is a hook of DDP's",
        "leave servers= and pipeline= out",
        "group=mesh.get_group('replicate')",
        "takes whole models",
        "attach once",
    ]
    for said in fresh_workers.run(_refusals):
        assert [want for want, got in zip(wanted, said, strict=True) if want not in got] == [], said
        assert all("\n" not in line for line in said)


@pytest.mark.parametrize("num_ranks", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_the_example_runs(tmp_path: Path, num_ranks: int) -> None:
    """Also with one process on each node, where a shard is all of it."""
    script = tmp_path / "example.py"
    example = Path(__file__).parents[2] / "examples" / "with_fsdp.py"
    script.write_text(f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n{example.read_text()}")
    codes, said = run_script(script, num_ranks)
    assert codes == [0] * num_ranks, said
    assert said.count("streaming: 20 steps (0 skipped), 2 workers") == num_ranks
    assert len([*(tmp_path / "with-fsdp").glob("*.distcp")]) == num_ranks
