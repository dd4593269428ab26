"""What users do with DDP, under laconic, over real Gloo processes with at least three buckets."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.integrations import attach_or_follow
from laconic.layout import Layout
from laconic.session import background, belongs_on_host
from tests.ddp_training import TINY_BUCKET_MB, Net, batch, num_buckets, start
from tests.workers import DEVICES, WorkerPool, equal_everywhere, flat_parameters

SPARSE = "topk:rho=0.05"
MANY = 3  # buckets at least


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _accumulate(text: str) -> dict[str, Any]:
    """Four micro-batches per step, three of them under no_sync, against one batch of all four."""
    many, one = start(text), start(text)
    for run in (many, one):
        run.ddp.module.eval()  # batch norm would see other batches
    for step in range(6):
        parts = [batch(4 * step + i) for i in range(4)]
        many.optimizer.zero_grad()
        with many.ddp.no_sync():
            for x, y in parts[:3]:
                _backward(cross_entropy(many.ddp(x), y) / 4)
        _backward(cross_entropy(many.ddp(parts[3][0]), parts[3][1]) / 4)
        many.optimizer.step()
        one.optimizer.zero_grad()
        _backward(cross_entropy(one.ddp(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])))
        one.optimizer.step()
    assert many.session is not None and num_buckets(many.session) >= MANY
    return {
        "steps": many.session.stats().steps,
        "difference": float((flat_parameters(many.ddp) - flat_parameters(one.ddp)).abs().max()),
        "equal": equal_everywhere(flat_parameters(many.ddp)),
    }


def test_gradient_accumulation(four_workers: WorkerPool) -> None:
    for result in four_workers.run(_accumulate, "dense"):
        assert result["steps"] == 6 and result["equal"]
        assert result["difference"] < 1e-5  # float32 sums in another order
    for result in four_workers.run(_accumulate, SPARSE):
        assert result["steps"] == 6 and result["equal"]


class TwoPaths(nn.Module):
    """`spare` is used by everyone at even steps only, `own` by rank 0 alone at every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.spare = nn.Linear(40, 30)
        self.own = nn.Linear(40, 31)

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        out: Tensor = self.net(x)
        if step % 2 == 0:
            out = out + self.spare(out).sum(1, keepdim=True)
        if step % 3 == 0 and rank == 0:
            out = out * (1 + self.own(out).mean(1, keepdim=True))
        return out


def _unused(text: str, views: bool) -> dict[str, Any]:
    run = start(text, TwoPaths(), find_unused_parameters=True, gradient_as_bucket_view=views)
    rank, model = dist.get_rank(), run.ddp.module
    names = {name: p for name, p in model.named_parameters()}
    given = {name: torch.zeros(p.numel()) for name, p in names.items()}
    applied = {name: torch.zeros(p.numel()) for name, p in names.items()}
    for step in range(12):
        x, y = batch(step)
        local = torch.autograd.grad(cross_entropy(model(x, step, rank), y), list(names.values()), allow_unused=True)
        run.optimizer.zero_grad()
        _backward(cross_entropy(run.ddp(x, step, rank), y))
        for (name, p), gradient in zip(names.items(), local, strict=True):
            given[name] += gradient.reshape(-1) if gradient is not None else 0
            applied[name] += p.grad.reshape(-1) if p.grad is not None else 0
        run.optimizer.step()
    assert run.session is not None and num_buckets(run.session) >= MANY
    residual = run.session.state_dict()["memory"]["residual"]
    worst = 0.0
    for name in names:
        owed = given[name] - residual[name]
        dist.all_reduce(owed)
        worst = max(worst, float((owed - dist.get_world_size() * applied[name]).abs().max()))
    return {"worst": worst, "equal": equal_everywhere(flat_parameters(run.ddp))}


@pytest.mark.parametrize(
    ("text", "views"),
    [
        (SPARSE, False),
        (SPARSE, True),
        ("topk:rho=0.05,per=parameter", False),
        ("topk:rho=0.05,warmup=4", False),
        ("lowrank:rank=2", False),
    ],
)
def test_unused_parameters_lose_nothing(four_workers: WorkerPool, text: str, views: bool) -> None:
    for result in four_workers.run(_unused, text, views):
        assert result["equal"]
        assert result["worst"] < 1e-4  # float32 rounding of twelve steps; a lost withdrawal would be about 1


def _scaled(text: str, overflow_at: int, steps: int) -> dict[str, Any]:
    """Train under a GradScaler with an overflow on rank 1 alone; beside it a run that just leaves that step out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=4)
    torch.manual_seed(7)
    views = "per=parameter" in text  # one of them, beside a run without
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=TINY_BUCKET_MB, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    session = laconic.attach(ddp, text, grad_scaler=scaler, pipeline=True)
    plain = start(text)
    scales, skipped_weights = [], True
    for number in range(steps):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(x), y)
        if number == overflow_at and dist.get_rank() == 1:
            loss = loss * torch.inf
        before = flat_parameters(ddp)
        _backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if number == overflow_at:
            skipped_weights = torch.equal(before, flat_parameters(ddp))
        else:
            plain.step(number)
    kept = session.state_dict()["memory"]
    assert plain.session is not None and num_buckets(session) >= MANY
    kept_plainly = plain.session.state_dict()["memory"]
    return {
        "scales": scales,
        "skipped": session.stats().skipped_steps,
        "skipped_weights": skipped_weights,
        "finite": all(bool(t.isfinite().all()) for tensors in kept.values() for t in tensors.values()),
        "same_weights": torch.equal(flat_parameters(ddp), flat_parameters(plain.ddp)),
        "same_residual": all(torch.equal(kept[k][n], kept_plainly[k][n]) for k in kept for n in kept[k]),
        "equal": equal_everywhere(flat_parameters(ddp)),
    }


@pytest.mark.parametrize(
    "text",
    [SPARSE, "topk:rho=0.05,per=parameter,quantize=fp16", "dgc:rho=0.05,ramp=4", "topk:warmup=8", "lowrank:rank=2"],
)
def test_grad_scaler(four_workers: WorkerPool, text: str) -> None:
    results = four_workers.run(_scaled, text, 5, 12)
    for result in results:
        assert result["scales"] == results[0]["scales"]
        assert result["scales"][5] == result["scales"][4] / 2 and result["scales"][-1] > result["scales"][5]
        assert result["skipped"] == 1 and result["skipped_weights"] and result["finite"] and result["equal"]
        assert result["same_weights"] and result["same_residual"]


def _joined_to_auto() -> bool:
    run = start(None)
    joined = attach_or_follow(run.ddp, run.optimizer, "auto")
    run.step(0)
    joined.close()
    return isinstance(joined, laconic.Attached)


def test_trainers_take_auto_too(two_workers: WorkerPool) -> None:
    assert two_workers.run(_joined_to_auto) == [True, True]


def _in_fp16(text: str, device: str) -> dict[str, Any]:
    """Train under autocast; at step 5 the inputs of rank 1 are too large for gradients in fp16."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    ddp = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKET_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=4)
    session = laconic.attach(ddp, text, grad_scaler=scaler)
    finite: list[bool] = []  # before the exchange
    first = next(net.parameters())
    first.register_hook(lambda gradient: finite.append(bool(gradient.isfinite().all())))  # type: ignore[no-untyped-call]
    scales = []
    for number in range(12):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        y = x[:, :10].argmax(1).to(device)
        x = x.to(device) * (1e4 if number == 5 and dist.get_rank() == 1 else 1)
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = cross_entropy(ddp(x), y)
        _backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    kept = session.state_dict()["memory"].values()
    weights = flat_parameters(ddp).cpu()
    return {
        "overflowed": [number for number, whether in enumerate(finite) if not whether],
        "scales": scales,
        "skipped": session.stats().skipped_steps,
        "finite": all(bool(t.isfinite().all()) for t in (weights, *(t for tensors in kept for t in tensors.values()))),
        "equal": equal_everywhere(weights),
    }


@pytest.mark.parametrize("text", [SPARSE, "maxnorm"])
@pytest.mark.parametrize("device", DEVICES)
def test_fp16_that_overflows_on_one_rank_leaves_no_trace(two_workers: WorkerPool, device: str, text: str) -> None:
    results = two_workers.run(_in_fp16, text, device)
    assert [result["overflowed"] for result in results] == [[], [5]]
    for result in results:
        assert result["skipped"] == 1 and result["finite"] and result["equal"]
        assert result["scales"] == [1024.0] * 3 + [2048.0] * 2 + [1024.0] * 4 + [2048.0] * 3


def _left_out(text: str) -> dict[str, Any]:
    """One NaN on rank 1 alone: a script that leaves the step out, and one whose gradient becomes zero."""
    result: dict[str, Any] = {}
    for way in ("nan", "zero"):
        torch.manual_seed(7)
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=TINY_BUCKET_MB)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        asked: dict[str, Any] = {} if way == "nan" else {"on_nonfinite": way}
        session = laconic.attach(ddp, text, **asked)
        finite = []
        for number in range(3):
            x, y = batch(number)
            optimizer.zero_grad()
            loss = cross_entropy(ddp(x), y)
            _backward(loss * torch.nan if number == 1 and dist.get_rank() == 1 else loss)
            finite.append(session.last_step_finite)
            if finite[-1] or way == "zero":
                optimizer.step()
        after = flat_parameters(ddp)
        result[way] = finite, bool(after.isfinite().all()), equal_everywhere(after)
        session.close()
    return result


@pytest.mark.parametrize("text", ["dense", SPARSE, "torch-fp16"])
def test_a_step_that_is_not_finite_never_reaches_the_weights_of_who_asks(four_workers: WorkerPool, text: str) -> None:
    if text == "torch-fp16":
        with pytest.raises(AssertionError, match="leave on_nonfinite out, and look at last_step_finite"):
            four_workers.run(_left_out, text)
        return
    for result in four_workers.run(_left_out, text):
        for finite, is_sound, are_equal in result.values():
            assert finite == [True, False, True] and is_sound and are_equal


def _in_bf16(text: str) -> dict[str, Any]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 60), nn.ReLU(), nn.Linear(60, 60))
    run = start(text, model.to(torch.bfloat16))
    run.optimizer.param_groups[0]["lr"] = 0.3  # smaller steps are lost in bf16 weights
    losses = []
    for number in range(40):
        x, y = batch(number)
        run.optimizer.zero_grad()
        loss = cross_entropy(run.ddp(x.to(torch.bfloat16)), y)
        _backward(loss)
        run.optimizer.step()
        losses.append(float(loss.detach()))
    assert run.session is not None
    kept = run.session.state_dict()["memory"]
    return {
        "falls": sum(losses[-5:]) < 0.9 * sum(losses[:5]),
        "float32": all(t.dtype == torch.float32 for tensors in kept.values() for t in tensors.values()),
        "equal": equal_everywhere(flat_parameters(run.ddp)),
        "messages": sum(c.messages for c in run.session.stats().by_kind.values()),
    }


@pytest.mark.parametrize("text", [SPARSE, "dense", "dgc:rho=0.05"])
def test_bf16_gradients(four_workers: WorkerPool, text: str) -> None:
    for result in four_workers.run(_in_bf16, text):
        assert result["falls"] and result["float32"] and result["equal"] and result["messages"] >= 3 * 39


def _rebuilt(text: str) -> tuple[list[list[str]], list[list[str]], bool]:
    run = start(text, TwoWay())
    assert run.session is not None
    cuts = []
    for number in range(3):
        run.step(number)
        cuts.append([list(bucket) for bucket in run.session.state_dict()["buckets"]])
    return cuts[0], cuts[-1], equal_everywhere(flat_parameters(run.ddp))


def _on_host(text: str, on_host: bool) -> dict[str, Any]:
    """Train, save, go on from there with a fresh module; as a small model on a GPU does, or not."""
    torch.manual_seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["laconic.adapters.ddp"], "belongs_on_host", lambda *_: on_host)
        first, again = start(text, TwoWay()), start(text, TwoWay())
    assert first.session is not None and again.session is not None
    for number in range(3):
        first.step(number)
    again.ddp.load_state_dict(first.ddp.state_dict())
    again.session.load_state_dict(first.session.state_dict())
    for number in range(3, 6):
        again.step(number)
    rooms = again.session._background._rooms  # type: ignore[attr-defined]
    return {"trained": flat_parameters(again.ddp), "bytes": again.session.stats().bytes_out, "copied": bool(rooms)}


@pytest.mark.parametrize("text", [SPARSE, "overlap:rho=0.05", "dense"])
def test_gradients_exchanged_in_a_copy_of_them(four_workers: WorkerPool, text: str) -> None:
    in_place, copied = (four_workers.run(_on_host, text, on_host) for on_host in (False, True))
    for here, there in zip(in_place, copied, strict=True):
        assert torch.equal(here["trained"], there["trained"]) and here["bytes"] == there["bytes"] > 0
        assert there["copied"] and not here["copied"]


def test_small_models_of_a_gpu_belong_on_the_host_where_messages_are_written_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, gpu = torch.device("cpu"), torch.device("cuda", 0)
    small, large = (Layout.of(["w"], [background.SMALL_MODEL + more]) for more in (0, 1))
    monkeypatch.setattr(laconic.kernels, "native_on_host", lambda: True)
    assert belongs_on_host(small, gpu, host)
    assert not any(belongs_on_host(*where) for where in ((large, gpu, host), (small, host, host), (small, gpu, gpu)))
    monkeypatch.undo()
    monkeypatch.setenv("LACONIC_KERNELS", "reference")
    assert not belongs_on_host(small, gpu, host)


class TwoWay(nn.Module):
    """Defined in another order than used, so that DDP's second cut of the buckets differs from its first."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(40, 50)
        self.first = nn.Linear(64, 40)
        self.middle = nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.middle(torch.relu(self.first(x.flatten(1))))))
        return out


def test_buckets_rebuilt_after_the_first_step(four_workers: WorkerPool) -> None:
    for first, later, equal in four_workers.run(_rebuilt, SPARSE):
        assert first != later, "DDP did not rebuild: the test tests nothing"
        assert len(later) >= 3 and {n for cut in first for n in cut} == {n for cut in later for n in cut}
        assert equal


def _small(text: str) -> tuple[dict[str, int], bool]:
    """A model in which no tensor is worth sparsifying."""
    layers = (nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 10))
    run = start(text, nn.Sequential(nn.Flatten(), *layers), bucket_mb=0.0001)
    for number in range(5):
        run.step(number)
    assert run.session is not None and num_buckets(run.session) >= MANY
    residual = run.session.state_dict()["memory"]["residual"]
    # Everything is sent: what stays is what bf16 rounded away, under 2^-8 of a value.
    rounding = max(float(t.abs().max()) for t in residual.values())
    return {name: c.messages for name, c in run.session.stats().by_kind.items()}, rounding < 0.01


def test_tensors_too_small_to_sparsify(four_workers: WorkerPool) -> None:
    for kinds, only_rounding in four_workers.run(_small, SPARSE):
        assert set(kinds) == {"sparse"} and only_rounding


def _compiled(text: str) -> tuple[bool, bool]:
    torch.manual_seed(7)
    torch._dynamo.config.optimize_ddp = False  # it refuses buckets under 1 MB, which only a test has
    run = start(text, torch.compile(Net(), backend="aot_eager"))  # type: ignore[arg-type]
    for number in range(3):
        run.step(number)
    assert run.session is not None
    names = set(run.session.state_dict()["memory"]["residual"])
    return names == {name for name, _ in Net().named_parameters()}, equal_everywhere(flat_parameters(run.ddp))


def test_compiled_models_keep_their_names(two_workers: WorkerPool) -> None:
    assert two_workers.run(_compiled, SPARSE) == [(True, True)] * 2


def _after_close(text: str, bucket_mb: float) -> tuple[bool, int, bool]:
    """After close() DDP averages by itself, the thread has ended, and a session that nobody holds lets its model go."""
    run, plain = start(text, bucket_mb=bucket_mb), start(None, bucket_mb=bucket_mb)
    run.step(0)
    assert run.session is not None
    run.session.close()
    left = [t.name for t in threading.enumerate()].count("laconic")
    plain.ddp.load_state_dict(run.ddp.state_dict())
    run.optimizer.load_state_dict(plain.optimizer.state_dict())
    for number in (1, 2):
        run.step(number)
        plain.step(number)
    # Gloo adds in another order where buckets are cut otherwise: some roundings of values of about 0.1.
    same = torch.allclose(flat_parameters(run.ddp), flat_parameters(plain.ddp), rtol=0, atol=1e-6)
    dropped = start(SPARSE)
    dropped.step(0)
    model = weakref.ref(dropped.ddp.module)
    del dropped
    gc.collect()
    return same, left, model() is None


@pytest.mark.parametrize("text", [SPARSE, "maxnorm:bits=4", "torch-powersgd"])
def test_a_closed_session_gives_the_model_back(fresh_workers: WorkerPool, text: str) -> None:
    bucket_mb = 100 if "powersgd" in text else TINY_BUCKET_MB
    assert fresh_workers.run(_after_close, text, bucket_mb) == [(True, 0, True)] * 4


def _changed_scheme(before: str, after: str) -> tuple[bool, bool]:
    """A session on a model that had another: it takes over what that kept where asked to, and models stay equal."""
    run = start(before)
    for number in range(3):
        run.step(number)
    assert run.session is not None
    kept = run.session.state_dict()
    run.session.close()
    run.session = laconic.attach(run.ddp, after, pipeline=True)
    if "residual" in kept["memory"] and "residual" in run.session.state_dict()["memory"]:
        run.session.load_state_dict(kept)
    losses = [run.step(number) for number in range(3, 25)]
    return equal_everywhere(flat_parameters(run.ddp)), bool(losses[-1] < losses[0])


@pytest.mark.parametrize("after", ["bf16", "topk:rho=0.1", "lowrank:rank=2"])
def test_the_scheme_may_change_in_mid_run(four_workers: WorkerPool, after: str) -> None:
    assert four_workers.run(_changed_scheme, SPARSE, after) == [(True, True)] * 4


def _strange_state() -> str:
    run = start(SPARSE)
    run.step(0)
    assert run.session is not None
    state = run.session.state_dict()
    state["memory"]["residual"]["renamed.weight"] = state["memory"]["residual"].pop("head.weight")
    try:
        run.session.load_state_dict(state)
    except laconic.StateError as error:
        return str(error)
    return ""


def test_a_state_with_other_names_is_refused(four_workers: WorkerPool) -> None:
    assert all("'renamed.weight'" in said for said in four_workers.run(_strange_state))


def _on_two_of_four() -> tuple[int, bool]:
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return 0, True
    run = start(SPARSE, process_group=pair)
    for number in range(5):
        run.step(number)
    assert run.session is not None
    weights = flat_parameters(run.ddp)
    others = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(others, weights, group=pair)
    return run.session.stats().num_workers, torch.equal(*others)


def test_ddp_over_some_of_the_ranks(four_workers: WorkerPool) -> None:
    assert four_workers.run(_on_two_of_four) == [(2, True), (2, True), (0, True), (0, True)]


def _disagree(how: str) -> str:
    """What a rank is told if rank 2 has another scheme, another release of laconic, or a model of other types."""
    torch.manual_seed(7)
    differs = dist.get_rank() == 2
    model = Net().bfloat16() if differs and how == "types" else Net()
    before = laconic.__version__
    laconic.__version__ = "0.0.9" if differs and how == "release" else before
    try:
        if how == "types":  # of which DDP says nothing to the point
            laconic.follow(model, torch.optim.SGD(model.parameters(), lr=0.1), "diloco")
        else:
            laconic.attach(DistributedDataParallel(model), "dense" if differs and how == "scheme" else SPARSE)
    except laconic.SchemeError as error:
        return str(error)
    finally:
        laconic.__version__ = before
    return ""


@pytest.mark.parametrize(
    ("how", "there", "here"),
    [
        ("scheme", "the scheme dense", f"the scheme {SPARSE}"),
        ("release", "laconic 0.0.9", f"laconic {laconic.__version__}"),
        ("types", *(f"conv.weight: torch.{t} of (8, 1, 3, 3) that is trained" for t in ("bfloat16", "float32"))),
    ],
)
def test_ranks_that_differ_are_told_who_and_in_what(four_workers: WorkerPool, how: str, there: str, here: str) -> None:
    said = four_workers.run(_disagree, how)
    cure = "give all ranks the same release, scheme and model"
    assert said[2] == f"rank 0 has {here}, this rank {there}; {cure}"
    assert said[0] == said[1] == said[3] == f"rank 2 has {there}, this rank {here}; {cure}"


def _in_float64() -> bool:
    torch.manual_seed(7)
    weights = []
    for text in (None, "dense"):
        run = start(text, Net().double())
        for number in range(3):
            x, y = batch(number)
            run.optimizer.zero_grad()
            _backward(cross_entropy(run.ddp(x.double()), y))
            run.optimizer.step()
        weights.append(torch.cat([p.detach().reshape(-1) for p in run.ddp.parameters()]))
    return torch.equal(*weights)


def test_float64_stays_float64_where_all_is_sent(four_workers: WorkerPool) -> None:
    assert all(four_workers.run(_in_float64))


def _refusals() -> list[str]:
    said = []
    net = Net()
    for wrong in (
        lambda: laconic.attach(net, SPARSE),
        lambda: laconic.attach(DistributedDataParallel(net), None),  # type: ignore[arg-type]
        lambda: laconic.attach(start(SPARSE).ddp, SPARSE),
        lambda: laconic.attach(DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKET_MB), "torch-powersgd"),
        lambda: laconic.attach(DistributedDataParallel(net), "topk:rho=3"),
        lambda: laconic.attach(DistributedDataParallel(torch.nn.Embedding(9, 2, sparse=True)), "bf16"),
    ):
        try:
            wrong()  # type: ignore[no-untyped-call]
        except laconic.LaconicError as error:
            said.append(str(error))
    return said


def test_wrong_use_is_one_line_with_the_cure(four_workers: WorkerPool) -> None:
    lines = four_workers.run(_refusals)[0]
    cures = [
        "DistributedDataParallel(model)",
        "give a text like 'topk:rho=0.01'",
        "close() the session that has it",
        "bucket_cap_mb=1",
        "(0, 1]",
        "set sparse=False",
    ]
    assert len(lines) == len(cures)
    for line, cure in zip(lines, cures, strict=True):
        assert cure in line and "\n" not in line
