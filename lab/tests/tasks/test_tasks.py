"""What a worker trains on, and whose statistics its norms keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from laconic_lab.errors import TaskError
from laconic_lab.tasks import TASKS, Data, Training, cifar
from laconic_lab.train.course import Course
from laconic_lab.train.ddp import DdpLearner, in_ddp
from laconic_lab.train.job import Job
from laconic_lab.train.loop import Observer, TrainingLoop
from laconic_lab.train.optimizer import Updater
from laconic_lab.train.result import Result
from laconic_lab.train.virtual import work_in_process
from laconic_lab.train.worker import make_learner
from tests.workers import WorkerPool, equal_everywhere


def test_examples_depend_on_the_step_alone() -> None:
    job, data = Job(scheme="dense", batch=500), TASKS["fashion-mnist"].load(None, None)
    course = Course(job, data, 1, 4)
    walk = len(data.train_targets) // 4 // 500  # steps in which each example of its share comes once
    in_order = [course.examples(step) for step in range(2 * walk)]
    for step in reversed(range(2 * walk)):
        for again in (course.examples(step), Course(job, data, 1, 4).examples(step)):
            assert all(torch.equal(a, b) for a, b in zip(again, in_order[step], strict=True))
    once, twice = (torch.cat([targets for _, targets in part]) for part in (in_order[:walk], in_order[walk:]))
    assert not torch.equal(once, twice) and torch.equal(once.bincount(), twice.bincount())


def test_cifar_images_are_normalised_shifted_and_mirrored() -> None:
    pixels = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    images = cifar.prepare(pixels)
    for channel, (mean, deviation) in enumerate(((0.491, 0.247), (0.482, 0.243), (0.447, 0.262))):
        expected = (pixels[:, channel].float() / 255 - mean) / deviation
        torch.testing.assert_close(images[:, channel], expected)
    moved = cifar.augment(images, torch.Generator().manual_seed(2))
    padded = torch.nn.functional.pad(images, (4,) * 4)
    shifts = [padded[:, :, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    found = {
        (shift, mirrored)
        for image in range(8)
        for shift, at in enumerate(shifts)
        for mirrored in (False, True)
        if torch.equal(moved[image], at[image].flip(2) if mirrored else at[image])
    }
    assert len({shift for shift, _ in found}) == 1 and {mirrored for _, mirrored in found} == {False, True}


@pytest.mark.parametrize(
    ("name", "num_entries"),
    [("resnet8", 75290), ("resnet20", 269722), ("resnet56", 853018), ("resnet50", 23520842), ("vgg16", 14724042)],
)
def test_models_of_cifar_have_their_papers_sizes_and_learn_through_every_layer(name: str, num_entries: int) -> None:
    images = torch.rand(2, 3, 32, 32)
    model = TASKS["cifar10"].model(name).make(Data(images, images, images, images, cifar.prepare))
    assert sum(p.numel() for p in model.parameters()) == num_entries
    logits = model(images)
    assert logits.shape == (2, 10)
    logits.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "files", "num_labels", "num_classes"),
    [
        ("cifar10", [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"], 1, 10),
        ("cifar100", ["train.bin", "test.bin"], 2, 100),
    ],
)
def test_cifar_is_read_from_its_binary_layout(
    tmp_path: Path, name: str, files: list[str], num_labels: int, num_classes: int
) -> None:
    draw = torch.Generator().manual_seed(3)
    records = torch.randint(256, (2 * len(files), num_labels + 3072), dtype=torch.uint8, generator=draw)
    records[:, num_labels - 1] %= num_classes
    for place, file in enumerate(files):
        records[2 * place : 2 * place + 2].numpy().tofile(tmp_path / file)
    data = TASKS[name].load(tmp_path, None)
    assert torch.equal(torch.cat([data.train_inputs, data.test_inputs]).view(-1, 3072), records[:, num_labels:])
    assert torch.equal(torch.cat([data.train_targets, data.test_targets]), records[:, num_labels - 1].long())
    assert TASKS[name].model("resnet8").make(data)(data.prepare(data.test_inputs)).shape == (2, num_classes)
    records[0, num_labels - 1] = num_classes
    records[:2].numpy().tofile(tmp_path / files[0])
    with pytest.raises(TaskError, match=f"labels beyond {num_classes - 1}"):
        TASKS[name].load(tmp_path, None)


def _running_mean_after_a_step(scheme: str) -> float:
    """Of a norm that held 1,000 times the rank before."""
    images, labels = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8)
    data = Data(images, labels, images, labels, cifar.prepare)
    job = Job(task="cifar10", model="resnet8", scheme=scheme, workers=2, batch=2, steps=1)
    learner = make_learner(job, data, torch.device("cpu"))
    norm = learner.model.get_buffer("stem.1.running_mean").fill_(1000.0 * dist.get_rank())
    TrainingLoop(job, learner.course, learner, learner.group).step_()
    return float(norm.mean())


@pytest.mark.parametrize(("scheme", "second"), [("dense", 0.0), ("silent", 900.0)])
def test_silent_keeps_norms_to_itself_too(two_workers: WorkerPool, scheme: str, second: float) -> None:
    assert two_workers.run(_running_mean_after_a_step, scheme) == pytest.approx([0.0, second], abs=1)


@pytest.mark.parametrize(
    "asked,expected",
    [
        ({"task": "fashion-mnist"}, Training(lr=0.2, batch=32)),
        ({"task": "chars"}, Training(lr=0.5, batch=16, context=64)),
        ({"task": "chars", "lr": 0.1, "clip_norm": 2.0}, Training(lr=0.1, batch=16, context=64, clip_norm=2.0)),
        (
            {"task": "chars", "optimizer": "adamw", "lr": 1e-3, "betas": "0.8,0.9", "context": 32},
            Training(lr=1e-3, batch=16, context=32, optimizer="adamw", betas=(0.8, 0.9)),
        ),
        # Momentum that the scheme's memory carries is no longer the optimizer's; a vote is a step by itself.
        ({"task": "chars", "scheme": "dgc:momentum=0.9"}, Training(lr=0.1, batch=16, context=64, momentum=0.0)),
        (
            {"task": "chars", "scheme": "dgc", "optimizer": "adamw", "lr": 1e-3},
            Training(lr=1e-3, batch=16, context=64, optimizer="adamw", betas=(0.0, 0.95)),
        ),
        ({"task": "chars", "scheme": "sign"}, Training(lr=1e-3, batch=16, context=64, momentum=0.0)),
    ],
)
def test_settings_are_the_models_unless_asked(asked: dict[str, Any], expected: Training) -> None:
    found = Job(**asked).training
    assert found.lr == pytest.approx(expected.lr)
    assert replace(found, lr=expected.lr) == expected


def test_a_gradient_is_clipped_to_its_norm_and_matrices_alone_decay() -> None:
    model = nn.Linear(3, 4)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    Updater(model, Training(lr=1.0, batch=1, momentum=0.0, weight_decay=0.0, clip_norm=0.5)).apply_()
    moved = torch.cat([(a - b).detach().flatten() for a, b in zip(before, model.parameters(), strict=True)])
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-4) and float(moved.std()) == pytest.approx(0, abs=1e-6)
    decays = {
        p: group["weight_decay"]
        for group in Updater(
            model, Training(lr=1.0, batch=1, optimizer="adamw", weight_decay=0.1)
        ).optimizer.param_groups
        for p in group["params"]
    }
    assert decays == {model.weight: 0.1, model.bias: 0.0}


def test_an_updater_goes_on_from_its_state() -> None:
    """Moments and the loss scale too: two steps are one, saved and loaded, and one more."""
    training = Training(lr=0.1, batch=1, optimizer="adamw")
    models = [nn.Linear(3, 4), nn.Linear(3, 4)]
    models[1].load_state_dict(models[0].state_dict())
    whole, first = (Updater(model, training, scales_loss=True) for model in models)
    for updater, model in ((whole, models[0]), (whole, models[0]), (first, models[1])):
        _step(updater, model)
    state = first.state_dict()
    assert state["grad_scaler"]["_growth_tracker"] == 1
    second = Updater(models[1], training, scales_loss=True)
    second.load_state_dict(state)
    _step(second, models[1])
    assert second.state_dict()["grad_scaler"] == whole.state_dict()["grad_scaler"]
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def _step(updater: Updater, model: nn.Module) -> None:
    updater.optimizer.zero_grad()
    updater.scaled(model(torch.ones(2, 3)).square().mean()).backward()  # type: ignore[no-untyped-call]
    updater.apply_()


def test_the_learning_rate_warms_up_and_falls_as_a_cosine() -> None:
    data = TASKS["fashion-mnist"].load(None, None)
    rates = {
        warmup: [Course(Job(steps=100, warmup=warmup), data, 0, 4).rate(step) for step in range(100)]
        for warmup in (None, 0, 10)
    }
    assert rates[0][0] == 1 and rates[10][:11] == pytest.approx([0.1 * i for i in range(1, 11)] + [1.0])
    assert rates[None][:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])  # a twentieth of the steps
    assert rates[10][55] == pytest.approx(0.5) and rates[10][99] == pytest.approx(math.sin(math.pi / 180) ** 2)


def _sequences(context: int) -> Data:
    windows = torch.randint(65, (4, context), generator=torch.Generator().manual_seed(1))
    return Data(windows, windows, windows, windows, lambda tokens: tokens, vocabulary=65)


@pytest.mark.parametrize(
    "name,millions", [("gpt", 0.62), ("gpt-tiny", 1.03), ("gpt-small", 10.8), ("gpt2", 85.3), ("gpt2-medium", 302.6)]
)
def test_language_models_are_as_large_as_they_say(name: str, millions: float) -> None:
    kind = TASKS["chars"].models[name]
    with torch.device("meta"):
        model = kind.make(_sequences(kind.training.context or 0))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6 * millions, rel=0.01)


def test_a_gpt2_begins_with_every_character_about_as_likely() -> None:
    torch.manual_seed(0)
    data = _sequences(16)
    model = TASKS["chars"].models["gpt-tiny"].make(data)
    targets = torch.randint(65, data.test_inputs.shape)
    loss = nn.functional.cross_entropy(model(data.test_inputs).flatten(0, 1), targets.flatten())
    assert float(loss.detach()) == pytest.approx(math.log(65), abs=0.2)


def _small_job(**options: Any) -> Job:
    asked = {"task": "chars", "model": "gpt-tiny", "scheme": "topk:rho=0.05", "steps": 2, "batch": 4, "context": 16}
    return Job(workers=2, **{**asked, **options})


def _text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(f"{i} times {i % 7} is {i * (i % 7)}.\n" for i in range(200)))
    return path


def _result_in_process(job: Job) -> Result:
    results: list[Result] = []
    assert work_in_process(job, results.append, lambda said: None) == 0
    return results[0]


def _over_processes(job: Job) -> dict[str, Any]:
    """What rank 0 of two finds after its steps."""
    torch.manual_seed(job.seed)
    learner = make_learner(job, job.load_data(), torch.device("cpu"))
    loop = TrainingLoop(job, learner.course, learner, learner.group)
    for _ in range(learner.course.num_steps):
        loop.step_()
    stats = learner.stats()
    found = {"loss": loop.evaluate()["loss"], "bytes_out": stats.bytes_out, "skipped_steps": stats.skipped_steps}
    learner.session.close()
    return found


def _check_ways(found: Callable[[Job], dict[str, Any]], job: Job) -> None:
    """The same job in micro-batches and in mixed precision comes to the same end."""
    whole, micro, bf16, fp16 = (
        found(replace(job, accumulate=parts, amp=amp))
        for parts, amp in ((1, None), (4, None), (1, "bf16"), (2, "fp16"))
    )
    assert micro["loss"] == pytest.approx(whole["loss"], rel=1e-3)  # sums are rounded in another order
    assert micro["bytes_out"] == pytest.approx(whole["bytes_out"], rel=0.01)  # one exchange, not four
    for mixed in (bf16, fp16):
        assert mixed["loss"] == pytest.approx(whole["loss"], rel=0.02) and mixed["skipped_steps"] == 0


@pytest.mark.parametrize(
    "scheme", ["topk:rho=0.05", pytest.param("gossip:mode=matched,rate=1", marks=pytest.mark.slow)]
)
def test_micro_batches_and_mixed_precision_train_alike(two_workers: WorkerPool, tmp_path: Path, scheme: str) -> None:
    job = _small_job(scheme=scheme, data=_text(tmp_path))
    _check_ways(lambda one: two_workers.run(_over_processes, one)[0], job)


def test_virtual_workers_gossip_what_processes_do(two_workers: WorkerPool, tmp_path: Path) -> None:
    job = _small_job(scheme="gossip-period:steps=2,mode=matched", data=_text(tmp_path), steps=3, eval_every=100)
    loss = two_workers.run(_averaged_loss, job)[0]
    result = _result_in_process(replace(job, in_process=True))
    assert result.loss == pytest.approx(loss, rel=1e-6)  # threads may add a batch's losses in another order
    assert result.bytes_out > 0


def _averaged_loss(job: Job) -> float:
    """The test loss of the mean of all models, after the last step."""
    torch.manual_seed(job.seed)
    learner = make_learner(job, job.load_data(), torch.device("cpu"))
    loop = TrainingLoop(job, learner.course, learner, learner.group)
    loop.run_(Observer())
    learner.session.close()
    return float(loop.last_evaluation["loss"])


@pytest.mark.slow  # half a minute where bf16 is emulated; over processes it is tested above
def test_so_they_do_among_virtual_workers(tmp_path: Path) -> None:
    job = _small_job(data=_text(tmp_path), in_process=True, eval_every=100)
    _check_ways(lambda one: _result_in_process(one).as_dict(), job)


def test_virtual_workers_say_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for scheme in ("topk", "local"):
        job = _small_job(scheme=scheme, data=_text(tmp_path), in_process=True, device="cuda")
        with pytest.raises(TaskError, match="no CUDA device here; use --device cpu"):
            _result_in_process(job)


def _overflow(job: Job) -> tuple[bool, int, float]:
    """(whether a step whose scaled gradient is too large for fp16 leaves the model alone, skipped steps, the scale)."""
    learner = make_learner(job, job.load_data(), torch.device("cpu"))
    scaler = learner.updater.grad_scaler
    assert scaler is not None
    scaler.scale(torch.zeros(1))  # from here on it has a scale
    scaler.update(2.0**40)
    before = [p.detach().clone() for p in learner.model.parameters()]
    learner.learn_(0)
    same = all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    skipped = learner.stats().skipped_steps
    learner.session.close()
    return same, skipped, scaler.get_scale()


def test_an_overflow_in_fp16_makes_no_step_on_any_worker(two_workers: WorkerPool, tmp_path: Path) -> None:
    job = _small_job(data=_text(tmp_path), amp="fp16")
    assert two_workers.run(_overflow, job) == [(True, 1, 2.0**39)] * 2


def test_a_test_whose_only_scorer_died_is_scored_again() -> None:
    """One batch of test data is scored by the first of the living, who may be gone when all add up."""

    class Group:
        place = 1
        num_living = 2

        def share_(self, buffers: object) -> None:
            pass

        def total(self, tensor: torch.Tensor) -> torch.Tensor:
            self.place, self.num_living = 0, 1  # as the server tells with its answer
            return tensor

    class Scorer:
        def score(self, model: object, device: object, place: int, num_living: int) -> list[float]:
            return [3.0, 2.0, 4.0] if place == 0 else [0.0, 0.0, 0.0]

    learner = object.__new__(DdpLearner)
    vars(learner).update(model=torch.nn.Linear(1, 1), course=Scorer(), group=Group(), _device=torch.device("cpu"))
    assert learner.score(is_last=True) == ([3.0, 2.0, 4.0], {})


def _begun(apart: bool) -> tuple[bool, int]:
    """Whether ranks end up with one model, and how many of this one's tensors became others."""
    torch.manual_seed(dist.get_rank() if apart else 0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(dist.get_rank() if apart else 0)  # type: ignore[operator]
    before = [tensor.clone() for tensor in model.state_dict().values()]
    in_ddp(model, None)
    same = all(equal_everywhere(tensor.view(-1)) for tensor in model.state_dict().values())
    return same, sum(not torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


@pytest.mark.parametrize("apart,num_sent", [(False, 0), (True, 3)])
def test_ranks_begin_alike(two_workers: WorkerPool, apart: bool, num_sent: int) -> None:
    """Rank 0's model is sent where it must be; weight, bias and mean are what differs here."""
    assert two_workers.run(_begun, apart) == [(True, 0), (True, num_sent)]
