"""The same numbers on a GPU: kernels, sessions, DDP over Gloo with staging, and NCCL with one rank."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laconic
from bench_wire import bench_wire
from lab.tests.cli.test_cli import laconic as run_laconic
from laconic import Scheme, Session, kernels
from laconic.kernels.device import Executor
from laconic.layout import Bucket
from laconic.quantize import BF16, QUANTIZERS
from laconic.session import background
from laconic.transport import Push
from laconic.wire import Bitmap, EliasFano, FrameShape
from laconic_lab.bench.step import Echo
from laconic_lab.train import Job, work_in_process
from laconic_lab.train.result import Result
from tests import virtual
from tests.inputs import SIZES, vectors
from tests.parts import ALL_TEXTS, gossip_texts, made, outer_texts, talking_schemes
from tests.virtual import gradients, one_step
from tests.workers import NO_GPU, WorkerPool, equal_everywhere, flat_parameters, free_port

pytestmark = NO_GPU


def test_finite_on_the_gpu() -> None:
    for n in SIZES:
        for x in vectors(n).values():
            assert kernels.all_finite(x.cuda()) == kernels.all_finite(x)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_frames_are_the_same_bytes(quantizer: str) -> None:
    quantize = QUANTIZERS[quantizer]()
    for n, k, fixed in ((500, 20, 3), (100_003, 1000, 0), (4000, 3000, 7), (1, 0, 1)):
        shape = FrameShape(n, k, fixed, quantize)
        positions = torch.randperm(n)[:k].sort().values.to(torch.int32)
        values = torch.randn(fixed + k)
        here = shape.write(positions, *quantize.encode(values), step=1, bucket=0)
        there = shape.write(positions.cuda(), *quantize.encode(values.cuda()), step=1, bucket=0)
        assert torch.equal(there.cpu(), here)
        contents = shape.read(there, step=1, bucket=0, peer=0)
        assert torch.equal(contents.positions.cpu(), positions)


def test_codes_of_large_buckets_round_trip() -> None:
    for n, k in ((2**27, 2**20), (2**31 - 1, 1000)):
        positions = torch.randint(n, (k,), device="cuda").sort().values.unique_consecutive().to(torch.int32)  # type: ignore[no-untyped-call]
        for codec in (EliasFano, Bitmap):
            words = codec.encode(positions, n)
            assert torch.equal(codec.decode(words, n, positions.numel()), positions)
    assert bench_wire(10_000_000, 0.01, "cuda").exact


@pytest.mark.parametrize("scheme", talking_schemes(), ids=str)
def test_sessions_give_the_numbers_of_the_cpu(scheme: Scheme) -> None:
    def on(device: str) -> list[dict[str, Tensor]]:
        def work(session: Session, rank: int) -> list[dict[str, Tensor]]:
            steps = []
            for step in range(5):
                given = {name: t.to(device) for name, t in gradients(rank, step).items()}
                steps.append({name: t.cpu() for name, t in one_step(session, given).items()})
            return steps

        return virtual.run(scheme, 4, work)[0]  # a power of two: CUDA multiplies by 1/M where a CPU divides

    for want, got in zip(on("cpu"), on("cuda"), strict=True):
        for name in want:
            if scheme.select.factors:  # a GPU multiplies matrices in another order
                off = 0.5 if isinstance(scheme.quantize, BF16) else 1e-2
                torch.testing.assert_close(got[name], want[name], atol=off, rtol=0)
            else:
                assert torch.equal(got[name], want[name])


class _Alone(Echo):
    """One worker, who owns everything."""

    def __init__(self) -> None:
        super().__init__(1)

    def push(self, push: Push) -> dict[int, Tensor]:
        return dict(enumerate(push.parts))

    def pull(self, push: Push, own: Tensor | None) -> list[Tensor]:
        assert own is not None
        return [own]


class _Launching(Executor):
    """Captures nothing."""

    def captures(self, tensor: Tensor, wire: torch.device | None) -> bool:
        return False


@pytest.mark.parametrize(
    "text",
    [
        *(f"topk:rho=0.05,quantize={quantize}" for quantize in ("bf16", "none", "fp16")),
        "topk:rho=0.05,exchange=server",
        "overlap:rho=0.05,score=product",
        "overlap:rho=0.05,score=member,quantize=none",
    ],
)
@pytest.mark.parametrize("scaled", [True, False])
def test_graphs_give_the_bits_of_launches_one_by_one(text: str, scaled: bool) -> None:
    """Through the stages, with gradients that stay where they are, one step of NaN, and a loss scale that changes."""
    layouts = virtual.LAYOUTS
    scheme = made(text)

    def steps(executor: Executor) -> list[Tensor]:
        transport = _Alone() if scheme.has_owners else Echo(2)
        session = Session(scheme, transport, loss_scale=(lambda: scale) if scaled else None, executor=executor)
        flats = [torch.empty(layout.num_entries, device="cuda") for layout in layouts]
        outs = []
        stages = background.Background(session, torch.device("cuda", 0))
        for step in range(20):
            scale = (8.0 if step < 10 else 4.0) if scaled else 1.0
            given = gradients(0, step)
            if step == 7:
                given["c"][3] = torch.nan
            for flat, layout in zip(flats, layouts, strict=True):
                flat.copy_(scale * torch.cat([given[name] for name in layout.names]))
            buckets = [
                Bucket(index, layout, flat, is_last=index == len(layouts) - 1)
                for index, (layout, flat) in enumerate(zip(layouts, flats, strict=True))
            ]
            for future in [stages.submit(bucket) for bucket in buckets]:
                future.wait()
            torch.cuda.synchronize()
            outs += [flat.cpu() for flat in flats]
        stages.close()
        kept = session.state_dict()["memory"]["residual"]
        return [*outs, *kept.values()]

    capturing, launching = Executor(), _Launching()
    replayed, launched = steps(capturing), steps(launching)
    # The third bucket goes whole; with owners a bucket is selected by a graph, else encoded by one and applied by one.
    assert capturing.num_replayed == (2 if scheme.has_owners else 4) and launching.num_replayed == 0
    for one, other in zip(replayed, launched, strict=True):
        assert torch.equal(one.cpu().nan_to_num(7), other.cpu().nan_to_num(7))


def _train(text: str, steps: int, small_model: int = background.SMALL_MODEL) -> dict[str, Any]:
    torch.manual_seed(7)
    torch.cuda.set_device(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).cuda()
    ddp = DistributedDataParallel(net, bucket_cap_mb=100 if "powersgd" in text else 0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "SMALL_MODEL", small_model)
        session = laconic.attach(ddp, text, pipeline=True)
    lr = 0.005 if text.startswith(("sign", "sparse-sign")) else 0.05  # a vote moves every weight by the rate
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(x.cuda()), x.argmax(1).cuda())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    stats = session.stats()
    return {
        "falls": sum(losses[-5:]) < sum(losses[:5]),
        "equal": equal_everywhere(flat_parameters(ddp).cpu() if dist.get_backend() == "gloo" else flat_parameters(ddp)),
        "messages": sum(c.messages for c in stats.by_kind.values()),
        "text": str(stats),
        "kernels": stats.kernels,
    }


@pytest.mark.parametrize(("small_model", "kernels_run"), [(0, "gpu"), (background.SMALL_MODEL, "cpu")])
@pytest.mark.parametrize("text", ALL_TEXTS)
def test_ddp_over_gloo_stages_through_the_host(
    two_workers: WorkerPool, text: str, small_model: int, kernels_run: str
) -> None:
    for result in two_workers.run(_train, text, 30, small_model):
        assert result["kernels"] == kernels_run or text.startswith(("torch-", "silent"))
        assert result["falls"] or "memory=none" in text
        assert result["equal"] == (text != "silent")
        assert result["messages"] >= 3 * 29 or text == "silent" or "powersgd" in text


def _gossip(text: str, worth_halving: int) -> dict[str, Any]:
    laconic.layout.WORTH_HALVING = worth_halving
    torch.manual_seed(7)
    torch.cuda.set_device(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).cuda()
    follower = laconic.follow(net, torch.optim.SGD(net.parameters(), lr=0.05), text)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(dist.get_rank())).cuda())
    before = follower.vector.read().cpu()
    for _ in range(40):
        follower.step()
    follower.settle()
    assert isinstance(follower, laconic.Follower)
    stats, after = follower.stats(), follower.vector.read().cpu()
    follower.close()
    return {"before": before, "after": after, "exchanges": stats.asked + stats.answered}


@pytest.mark.parametrize(("text", "worth_halving"), [*((text, 1 << 19) for text in gossip_texts()), ("gossip", 2)])
def test_models_on_the_gpu_gossip_and_keep_their_mean(two_workers: WorkerPool, text: str, worth_halving: int) -> None:
    found = two_workers.run(_gossip, text, worth_halving)
    before, after = (torch.stack([one[when] for one in found]).double() for when in ("before", "after"))
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=5e-6, rtol=0)  # some float32 additions
    assert found[0]["exchanges"] or "change" in text or "rate" in text  # what does not move has nothing to say


@pytest.fixture(scope="module")
def one_nccl_rank() -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group("nccl", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _outer(text: str, device: str, on_host: bool) -> Tensor:
    """The model after some rounds, of workers whose models wander alike on any device."""
    torch.manual_seed(7)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).to(device)
    follower = laconic.follow(net, torch.optim.SGD(net.parameters(), lr=0.05), text, on_host=on_host)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(9):
        with torch.no_grad():
            for p in net.parameters():
                p.add_((torch.randn(p.shape, generator=generator) * 0.01).to(device))
        follower.step()
    follower.settle()
    after = follower.vector.read().cpu()
    follower.close()
    return after


@pytest.mark.parametrize("text", outer_texts())
def test_models_on_the_gpu_agree_as_on_the_cpu(two_workers: WorkerPool, text: str) -> None:
    there = two_workers.run(_outer, text, "cpu", False)
    for on_host in (False, True):
        for want, got in zip(there, two_workers.run(_outer, text, "cuda", on_host), strict=True):
            torch.testing.assert_close(got, want, atol=1e-2 if "low-rank" in text else 1e-5, rtol=0)


@pytest.mark.parametrize("text", ALL_TEXTS)
def test_nccl_with_one_rank(one_nccl_rank: None, text: str) -> None:
    result = _train(text, 30)
    print(result["text"])
    assert result["falls"] or "memory=none" in text
    assert result["equal"]


@pytest.mark.parametrize("scheme", ["bf16", "topk:rho=0.01", "overlap:rho=0.01", "lowrank", "streaming:every=4"])
def test_virtual_workers_learn_on_the_gpu_as_on_the_cpu(scheme: str) -> None:
    def loss(device: str) -> float:
        job = Job(scheme=scheme, steps=20, eval_every=20, in_process=True, device=device)
        job = replace(job, optimizer="adamw", lr=1e-3)  # on CUDA it wants gradients laid out as the weights
        results: list[Result] = []
        assert work_in_process(job, results.append, lambda said: None) == 0
        return results[0].loss

    assert loss("cuda") == pytest.approx(loss("cpu"), rel=0.1)  # 20 steps apart from other sums of convolutions


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_a_language_model_trains_and_tells_its_peak_memory(tmp_path: Path, amp: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i % 7} is {i * (i % 7)}.\n" for i in range(2000)))
    job = ["--task", "chars", "--model", "gpt-tiny", "--data", str(text), "--context", "64", "--accumulate", "2"]
    ran = run_laconic("train", *job, "--workers", "2", "--steps", "10", "--device", "cuda", "--amp", amp, "--json")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    # Weights, gradients and AdamW's two moments in float32; activations are another few MB.
    assert result["peak_memory_bytes"] > 4 * 4 * 1_000_000 and result["loss"] < 3
