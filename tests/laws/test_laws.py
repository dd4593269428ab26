"""The laws of the house, over every implementation of the table in parts.py."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import laconic
from laconic import GossipScheme, OuterScheme, Scheme, SchemeError, Session, TorchHook, parse, recipes
from laconic.exchange import AllGather, AllReduce, Server
from laconic.layout import Layout
from laconic.memory import Residual
from laconic.paths import bytes_out
from laconic.quantize import FP16, Levels, ModuloCode
from laconic.scheme import PARTS, AnyScheme, write_part
from laconic.scheme.parts import ARGUMENTS
from laconic.select import TopK
from laconic.session import Stats
from laconic.testing import InProcess
from tests.parts import (
    ALL_TEXTS,
    RECIPE_TEXTS,
    adds_exactly,
    conserving_schemes,
    gossip_texts,
    made,
    outer_texts,
    own_schemes,
    remembering_schemes,
    talking_schemes,
    torch_hooks,
)
from tests.virtual import LAYOUTS, gradients, in_process, layout_of, one_step, run

M = 4


class Step(NamedTuple):
    """What a law may look at after a step of one worker."""

    result: dict[str, Tensor]
    state: dict[str, Any]
    stats: Stats


@cache
def course(scheme: Scheme, num_workers: int = M, num_steps: int = 10) -> list[list[Step]]:
    """The steps of each worker from the first on: one run, at which several laws look."""

    def work(session: Session, rank: int) -> list[Step]:
        def stepped(step: int) -> Step:
            result = one_step(session, gradients(rank, step))
            return Step(
                {name: tensor.clone() for name, tensor in result.items()}, session.state_dict(), session.stats()
            )

        return [stepped(step) for step in range(num_steps)]

    return run(scheme, num_workers, work)


def test_the_table_is_complete() -> None:
    """Every recipe and every answer to every question stands in the table."""
    assert set(RECIPE_TEXTS) == set(recipes.RECIPES)
    for question, answers in PARTS.items():
        followed = [*gossip_texts(), *outer_texts()]
        schemes = [*own_schemes(), *map(parse, followed)]
        used = {type(scheme.answers[question]) for scheme in schemes if question in scheme.answers}
        assert used == set(answers.values()), f"no scheme of the table has every answer to {question}"
    assert {hook.hook for hook in torch_hooks()} == {"fp16", "powersgd"}


@pytest.mark.parametrize("text", [*ALL_TEXTS, *gossip_texts(), *outer_texts()])
def test_a_printed_scheme_parses_back(text: str) -> None:
    scheme = parse(text)
    assert parse(str(scheme)) == scheme
    if isinstance(scheme, Scheme | GossipScheme | OuterScheme):
        answers = ",".join(f"{q}={write_part(q, answer)}" for q, answer in scheme.answers.items())
        assert parse(f"scheme:{answers}") == scheme


@pytest.mark.parametrize("num_workers", [1, M])
@pytest.mark.parametrize("scheme", [s for s in conserving_schemes() if "velocity" not in s.memory.kinds], ids=str)
def test_nothing_is_lost(scheme: Scheme, num_workers: int) -> None:
    """At each step, summed over workers: what was kept, faded, + deposits = applied * M + what is kept afterwards."""
    two_stages = isinstance(scheme.exchange, AllReduce) and scheme.exchange.stages == 2
    if num_workers > 1 and scheme.exchange.adds_in_flight and (two_stages or not adds_exactly(scheme)):
        pytest.skip("this sum is rounded in flight, where no worker can keep what it loses; one worker is exact")

    balances: dict[str, Any] = {}
    held: dict[str, Any] = {}
    run_of_all = course(scheme) if num_workers == M else course(scheme, num_workers, 6)
    for number, steps in enumerate(zip(*run_of_all, strict=True)):
        given = [gradients(rank, number) for rank in range(num_workers)]
        for name, applied in steps[0].result.items():
            deposits = sum(gradient[name] for gradient in given)
            owed = scheme.memory.fade * balances.get(name, 0.0) + held.get(name, 0.0) + deposits
            balances[name] = sum(step.state["memory"]["residual"][name] for step in steps)
            if scheme.holds and name in steps[0].state["owner"]["held"]:  # once an owner was asked; it does not fade
                held[name] = torch.cat([step.state["owner"]["held"][name] for step in steps])
            accounted = num_workers * applied + balances[name] + held.get(name, 0.0)
            # |values| reach about 60; float32 sums over four workers err by some ulp of that.
            torch.testing.assert_close(accounted, owed, atol=1e-4, rtol=0)


@pytest.mark.parametrize("scheme", [s for s in conserving_schemes() if "velocity" in s.memory.kinds], ids=str)
def test_momentum_deposits_its_velocity(scheme: Scheme) -> None:
    """Per worker and step: sent + balance = balance before + velocity after the deposit."""
    momentum: float = scheme.memory.momentum

    def work(session: Session, rank: int) -> None:
        for step in range(5):
            before = session.state_dict()["memory"]
            fresh = gradients(rank, step)
            out = one_step(session, fresh)
            after = session.state_dict()["memory"]
            for name, grad in fresh.items():
                velocity = grad + (momentum * before["velocity"][name] if before["velocity"] else 0)
                owed = velocity + (before["residual"][name] if before["residual"] else 0)
                torch.testing.assert_close(out[name] + after["residual"][name], owed, atol=1e-4, rtol=1e-6)

    run(scheme, 1, work)


@pytest.mark.parametrize("scheme", talking_schemes(), ids=str)
def test_all_workers_apply_the_same_update(scheme: Scheme) -> None:
    for first, *others in zip(*course(scheme), strict=True):
        for other in others:
            assert all(torch.equal(tensor, other.result[name]) for name, tensor in first.result.items())


@pytest.mark.parametrize("scheme", own_schemes(), ids=str)
def test_saving_and_loading_changes_nothing(scheme: Scheme) -> None:
    """Five steps, save, load, five steps = ten steps, bit for bit, though the new session starts on other buckets."""
    first_guess = (layout_of("gfe"), layout_of("dcba"))
    whole = course(scheme)

    def resumed(session: Session, rank: int) -> tuple[list[dict[str, Tensor]], dict[str, object]]:
        session.load_state_dict(whole[rank][4].state)
        outs = [one_step(session, gradients(rank, 5), first_guess)]
        outs += [one_step(session, gradients(rank, step)) for step in range(6, 10)]
        return outs, session.state_dict()

    for want, (got, got_state) in zip(whole, run(scheme, M, resumed), strict=True):
        for step, result in zip(want[5:], got, strict=True):
            assert all(torch.equal(tensor, result[name]) for name, tensor in step.result.items())
        assert _flat(want[-1].state) == _flat(got_state)


def _flat(state: object) -> object:
    if isinstance(state, dict):
        return {key: _flat(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state


@pytest.mark.parametrize("scheme", talking_schemes(), ids=str)
def test_bytes_are_those_foretold(scheme: Scheme) -> None:
    """Once the trigger has reached its target, two steps send exactly what the formula says."""

    sent = []
    for steps in course(scheme):
        before, after = steps[5].stats, steps[7].stats
        sent.append(((after.bytes_out - before.bytes_out) / 2, (after.bytes_in - before.bytes_in) / 2))
    foretold = sum(bytes_out(scheme, layout, M) for layout in LAYOUTS)
    if isinstance(scheme.exchange, Server):
        # Parts and unions have lengths of their own, at most those of independent choices: here the workers have some
        # in common. A frame of words may have three more than its share of the formula, once up and M times down.
        mean_out, mean_in = (sum(column) / M for column in zip(*sent, strict=True))
        assert 0.3 * foretold < mean_out == mean_in <= foretold + len(LAYOUTS) * 2 * (M - 1) * 12
    else:
        assert sent == [(foretold, foretold)] * M


@pytest.mark.parametrize("scheme", remembering_schemes(), ids=str)
def test_a_loss_scale_changes_nothing_but_the_unit(scheme: Scheme) -> None:
    def work(transport: InProcess) -> None:
        scale = 1024.0
        session = Session(scheme, transport, loss_scale=lambda: scale)
        plain = Session(scheme, transport)

        def scaled(step: int) -> dict[str, Tensor]:
            return {name: scale * t for name, t in gradients(transport.rank, step).items()}

        for step in range(4):
            got, want = one_step(session, scaled(step)), one_step(plain, gradients(transport.rank, step))
            assert all(torch.equal(got[name], scale * want[name]) for name in want)  # powers of two scale exactly
            scale *= 2

    in_process(3, work)


@pytest.mark.parametrize("text", [t for t in ALL_TEXTS if "per=parameter" in t])
def test_per_parameter_selection_ignores_the_buckets(text: str) -> None:
    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    one = (layout_of("eabcfdg"),)

    def with_layouts(session: Session, rank: int) -> list[dict[str, Tensor]]:
        return [one_step(session, gradients(rank, step)) for step in range(3)]

    def in_one(session: Session, rank: int) -> list[dict[str, Tensor]]:
        return [one_step(session, gradients(rank, step), one) for step in range(3)]

    if isinstance(scheme.quantize, FP16):
        pytest.skip("fp16 shares a scale within a bucket")
    for want, got in zip(run(scheme, 2, with_layouts)[0], run(scheme, 2, in_one)[0], strict=True):
        assert all(torch.equal(want[name], got[name]) for name in want)


def test_answers_that_do_not_fit_are_refused_with_a_cure() -> None:
    for text, cure in {
        "scheme:select=topk(rho=0.1),exchange=all-reduce": "AllGather",
        "scheme:exchange=silent,memory=residual": "Nothing()",
        "scheme:trigger=ramp(steps=3)": "EveryStep()",
        "scheme:select=randk(rho=0.1),exchange=all-gather": "AllReduce()",
        "scheme:quantize=maxnorm(levels=7),exchange=all-gather": "AllReduce()",
        "scheme:quantize=maxnorm(levels=1),memory=residual": "levels=2 or more",
        "scheme:quantize=bf16,exchange=all-reduce(stages=2)": "MaxNorm()",
        "scheme:quantize=sign": "Server() or AllGather()",
        "scheme:select=overlap(rho=0.1),exchange=all-gather": "use Server()",
        "scheme:select=topk(rho=0.1),exchange=server(combine=majority)": "use quantize=Sign()",
        "scheme:quantize=sign,memory=residual,exchange=server(combine=weighted)": "Accumulated() or Nothing()",
        "scheme:quantize=sign,exchange=server(combine=majority),trigger=warm-up(steps=3)": "EveryStep() or Ramp()",
        "scheme:select=topk(rho=0.1),exchange=server(down_rho=0.1)": "memory=Residual()",
        "scheme:quantize=sign,exchange=server(combine=majority,down_rho=0.1)": "leave Server.down_rho out",
        "scheme:select=topk(rho=0.1),quantize=levels,exchange=all-gather": "use Residual()",
        "scheme:select=low-rank,memory=none": "use Residual()",
        "scheme:select=low-rank,memory=residual,exchange=all-gather": "AllReduce()",
        "lowrank:quantize=maxnorm(levels=7)": "BF16() or Exact()",
        "lowrank:quantize=levels": "use BF16() or Exact()",
        "scheme:select=low-rank,memory=residual,trigger=ramp(steps=3)": "EveryStep() or WarmUp()",
        "lowrank:rank=0": "give 1 or more",
        "lowrank:form=one": "give one of both, alternating",
        "scheme:memory=residual(decay=0)": "or use Nothing()",
        "scheme:select=topk(rho=0.1),memory=residual(decay=0.9),exchange=gossip": "leave memory out",
        "topk:quantize=lloyd(group=100)": "a multiple of 16",
        "scheme:quantize=lloyd,exchange=all-gather": "use Residual()",
        "sparse-sign:cover=-1": "above 0",
        "overlap:score=best": "give one of local",
        "gossip:rho=7": "a share in",
        "maxnorm:bits=5,levels=7": "give one",
        "maxnorm:bits=1": "give 2 to 32",
        "maxnorm:bits=20000": "give 2 to 32",
        "muloco:bits=1": "give 2 to 32",
        "multiscale:share=12": "a multiple of it",
    }.items():
        with pytest.raises(SchemeError, match=cure.replace("(", r"\(").replace(")", r"\)")):
            parse(text)


def test_momentum_of_small_and_idle_parameters_is_left_alone() -> None:
    """Ties at zero fill up the k, and an idle parameter is not used: neither may lose its velocity."""
    scheme = parse("scheme:select=topk(rho=0.5),memory=momentum,exchange=all-gather")
    assert isinstance(scheme, Scheme)
    layout = (Layout.of(["small", "zero", "idle"], [10, 2000, 1000]),)

    def work(transport: InProcess) -> None:
        session = Session(scheme, transport, holds_idle=True)
        given = {"small": torch.ones(10), "zero": torch.zeros(2000), "idle": torch.ones(1000)}
        one_step(session, given, layout)
        before = session.state_dict()["memory"]
        one_step(session, {**given, "idle": torch.zeros(1000)}, layout)
        after = session.state_dict()["memory"]
        assert torch.equal(after["velocity"]["small"], torch.full((10,), 1.9))
        assert all(torch.equal(after[kind]["idle"], before[kind]["idle"]) for kind in after)

    in_process(1, work)


@pytest.mark.parametrize("exchange", ["all-gather", "server"])
def test_signs_of_idle_parameters_leave_what_they_are_owed_alone(exchange: str) -> None:
    """A zero is written as a plus, and what that says too much must not be charged to who does not take part."""
    scheme = parse(f"scheme:select=topk(rho=0.1),quantize=sign,memory=residual,exchange={exchange}")
    assert isinstance(scheme, Scheme)
    layout = (Layout.of(["used", "idle"], [2000, 10]),)

    def work(transport: InProcess) -> None:
        session = Session(scheme, transport, holds_idle=True)
        draw = torch.Generator().manual_seed(1)
        given = {"used": torch.randn(2000, generator=draw), "idle": torch.randn(10, generator=draw)}
        one_step(session, given, layout)
        before = session.state_dict()["memory"]["residual"]["idle"]
        for _ in range(3):
            one_step(session, {**given, "idle": torch.zeros(10)}, layout)
        assert torch.equal(session.state_dict()["memory"]["residual"]["idle"], before) and before.any()

    in_process(2, work)


def test_stats_after_a_resume_are_of_the_steps_since() -> None:
    scheme = parse("topk:rho=0.05")
    assert isinstance(scheme, Scheme)

    def work(transport: InProcess) -> None:
        session = Session(scheme, transport)
        one_step(session, gradients(transport.rank, 0))
        resumed = Session(scheme, transport)
        resumed.load_state_dict(session.state_dict() | {"step": 100})
        one_step(resumed, gradients(transport.rank, 1))
        assert resumed.stats().steps == 101 and resumed.stats().steps_here == 1

    in_process(2, work)


def test_stats_are_a_snapshot() -> None:
    def work(session: Session, rank: int) -> None:
        one_step(session, gradients(rank, 0))
        first = session.stats()
        sent = first.by_kind["sparse"].bytes_out
        one_step(session, gradients(rank, 1))
        assert first.by_kind["sparse"].bytes_out == sent < session.stats().by_kind["sparse"].bytes_out

    scheme = parse("topk:rho=0.05")
    assert isinstance(scheme, Scheme)
    run(scheme, 2, work)


def test_torch_hooks_print_what_they_are() -> None:
    assert str(TorchHook(hook="fp16")) == "torch-fp16"
    assert parse(str(TorchHook(hook="powersgd", rank=4))) == TorchHook(hook="powersgd", rank=4)
    with pytest.raises(SchemeError, match="give one of fp16, powersgd"):
        TorchHook(hook="powersdg")


def test_every_recipe_and_parameter_has_a_line_of_meaning() -> None:
    for name, recipe in recipes.RECIPES.items():
        words = (inspect.getdoc(recipe) or "").splitlines()
        assert words[0].endswith(".") and not words[1], name
        assert set(inspect.signature(recipe).parameters) <= set(ARGUMENTS), name


def test_a_part_is_a_text_or_an_object() -> None:
    """Both make the same scheme, and the text that names it."""
    scores = laconic.select.SCORES
    schemes: dict[str, AnyScheme] = {
        "topk:rho=0.01": recipes.topk(0.01),
        "topk:rho=0.01,quantize=levels(bits=5)": recipes.topk(0.01, quantize=Levels(5)),
        "topk:exchange=server(down_rho=0.1)": recipes.topk(exchange=Server(down_rho=0.1)),
        "overlap:score=member": recipes.overlap(score=scores["member"]),
        "gossip:quantize=modulo(bits=5)": recipes.gossip(quantize=ModuloCode(5)),
        "randk-maxnorm:memory=none": recipes.randk_maxnorm(memory=laconic.memory.Nothing()),
    }
    for text, scheme in schemes.items():
        assert parse(text) == scheme == parse(scheme) and str(scheme) == text
    texts: Any = {"select": "topk(rho=0.01)", "exchange": "all-gather", "memory": Residual()}
    assert Scheme(**texts) == Scheme(select=TopK(0.01), exchange=AllGather(), memory=Residual())


def test_an_unknown_name_offers_the_nearest() -> None:
    for text, cure in {
        "topkk:rho=0.1": "unknown recipe 'topkk'; did you mean 'topk'?",
        "topk:roh=0.1": "topk has no parameter 'roh'; did you mean 'rho'?",
        "topk:quantize=bf15": "unknown quantize 'bf15'; did you mean 'bf16'?",
        "topk:quantize=levels(bit=4)": "quantize=levels has no parameter 'bit'; did you mean 'bits'?",
        "local:16": "'16' is not key=value; write local:every=...",
        "streaming,every=16": "'streaming,every=16' is no scheme; write streaming:key=value,key=value",
        "topk(rho=0.01)": "'topk(rho=0.01)' is no scheme; write topk:key=value,key=value",
        "scheme:selct=topk": "scheme has no question 'selct'; did you mean 'select'?",
        "dense:rho=0.1": "dense has no parameter 'rho'; it takes none",
    }.items():
        with pytest.raises(SchemeError) as error:
            parse(text)
        assert str(error.value) == cure
    with pytest.raises(SchemeError, match="did you mean 'warmup'"):
        recipes.topk(0.01, warm_up=3)  # type: ignore[call-arg]
    for text in ("?", "int8"):  # which is no `silent`
        with pytest.raises(SchemeError, match="give one of dense, bf16"):
            parse(text)


def test_a_run_takes_one_index() -> None:
    layout = Layout.of(["weight"], [(1000, 1000)])
    blocks, one_by_one = (bytes_out(made(text), layout, M) for text in ("block-topk:rho=0.01", "topk:rho=0.01"))
    assert blocks < 0.67 * one_by_one  # 16.3 bits an entry that goes, instead of 24.6


@pytest.mark.parametrize("text", ["scheme:select=topk(rho=0.05),memory=none,exchange=all-gather", "overlap:rho=0.05"])
def test_torchs_default_type_does_not_matter(text: str) -> None:
    def work(session: Session, rank: int) -> list[dict[str, Tensor]]:
        return [one_step(session, gradients(rank, step)) for step in range(3)]

    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    usual, floats = run(scheme, 2, work), [[gradients(rank, step) for rank in range(2)] for step in range(3)]
    torch.set_default_dtype(torch.float64)
    try:
        unusual = run(scheme, 2, lambda session, rank: [one_step(session, g[rank]) for g in floats])
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(usual[0], unusual[0], strict=True) for name in a)
