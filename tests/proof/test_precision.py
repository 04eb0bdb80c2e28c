"""A plan's own mixed precision: right plans are within rounding, and seeded faults are not."""

import math

import pytest
import torch
from helpers import sampled, simulated_case, slow
from transformers import LlamaConfig, LlamaForCausalLM

import planc
from planc.ops.document import digest
from planc.ops.fsdp import Divide
from planc.ops.tensor_parallel import Parallelize, Tie
from planc.proxy.user_model import builder_of
from planc.runtime.executor import apply_for_reference, apply_lowered
from planc.simulate import thread_ranks
from planc.simulate.batches import batches
from planc.simulate.numerics import Operations, norm_error, tolerance
from planc.simulate.program import RankResult, seed_rank, train_rank, train_single
from planc.simulate.prove import compare_rounded
from planc.simulate.trial_part import rounds, trial_part


def errors(model, plan, fault=lambda ops: ops, settings=("tp=2",)):
    """(name, error, limit) of what is beyond its limit on any rank, and the largest error.

    Args:
        fault: changes the operations that the ranks apply, of the plan that is judged.
    """
    small = simulated_case(model, plan, settings)
    lowered = trial_part(small.compiled.lowered, precision=True)
    assert rounds(lowered)
    builder = builder_of(small.model.values, "")
    data = batches(builder, lowered, 0)
    reference = train_single(apply_for_reference(builder.build(0), lowered), data, lowered)
    plain = builder.build(0)
    with torch.no_grad(), Operations() as operations:
        plain(**data.steps[0][0].inputs)
    applied = lowered.map_ops(lambda _: fault(list(lowered.ops)))
    assert fault([]) == [] or applied != lowered
    models = [builder.build(0) for _ in range(lowered.world_size)]
    results = [RankResult() for _ in models]

    def rank(number):
        model = models[number]
        seed_rank(number)
        run = apply_lowered(model, applied, digest=digest(applied), device_type="cpu")
        train_rank(model, run, data, results[number], traced=False)

    failure = thread_ranks.run_ranks(lowered.world_size, rank, seconds=300)
    assert failure is None, failure
    assert not operations.chooses
    found = [compare_rounded(r, reference, lowered, operations) for r in results]
    kinds = [
        (kind, value, one.limits[kind])
        for one in found
        for kind, value in (
            ("logits", one.logits),
            ("loss", one.loss),
            ("norm", one.norm),
            *(("gradients", error) for error in one.gradients.values()),
        )
    ]
    beyond = {kind for kind, value, limit in kinds if not value <= limit}
    return beyond, max(value for _, value, _ in kinds), found[0].limits["logits"]


@pytest.mark.parametrize(
    ("model", "plan"),
    sampled(
        [
            ("llama-3.2-1b", "llama"),
            ("gpt2", "gpt2"),
            ("qwen3-8b", "qwen3"),
            ("phi-3-mini", "phi3"),
        ],
        2,
    ),
)
def test_right_plans_are_within_rounding(model, plan):
    beyond, worst, limit = errors(model, plan)
    assert not beyond
    assert 1e-3 < worst < limit / 3 < 0.05  # bfloat16 rounds; the faults below are 0.5 and more


def divided(ops):
    """Gradients of two data ranks divided by four."""
    return [*ops, Divide(factor=4.0)] if ops else []


def untied(ops):
    return [op for op in ops if not isinstance(op, Tie)]


def unreduced(ops):
    """Norms of heads whose gradients each rank keeps for itself."""
    return [
        op
        for op in ops
        if not (isinstance(op, Parallelize) and str(op.modules).endswith(("q_norm", "k_norm")))
    ]


@pytest.mark.parametrize(
    ("model", "plan", "fault"),
    [
        ("llama-3.2-1b", "llama", divided),
        slow("llama-3.2-1b", "llama", untied),
        slow("gpt2", "gpt2", untied),
        ("qwen3-8b", "qwen3", unreduced),
    ],
)
def test_seeded_faults_are_beyond_it(model, plan, fault):
    beyond, worst, limit = errors(model, plan, fault)
    assert "gradients" in beyond
    assert worst > 3 * limit


def test_the_tolerance_follows_the_formula():
    lowered = trial_part(
        simulated_case("llama-3.2-1b", "llama", ("tp=2",)).compiled.lowered, precision=True
    )
    unit = 2.0**-8  # bfloat16, reduced in float32
    assert tolerance(lowered, 100) == pytest.approx(3 * unit * 10, rel=1e-6)
    exact = trial_part(lowered)
    assert not rounds(exact)
    assert tolerance(exact, 100) < 1e-5


def test_operations_that_round_are_counted():
    with Operations() as operations:
        x = torch.ones(2, 3)  # one
        y = (x @ x.t()).exp()  # two, and a view
        torch.cat([y, -y]).argmax()  # copies, and integers
    assert operations.count == 3


def test_a_router_chooses():
    with Operations() as operations:
        torch.ones(4).topk(2)
    assert operations.chooses


def test_the_error_is_of_the_norm():
    right = torch.tensor([3.0, 4.0])
    assert norm_error(right * 1.1, right) == pytest.approx(0.1)
    assert norm_error(right, torch.zeros(2), floor=10.0) == pytest.approx(0.5)
    assert norm_error(torch.ones(3), right) == math.inf
    assert norm_error(right * math.nan, right) == math.inf


HALF = """plan own for llama

mesh {
    dp_shard = 2
}

fsdp on dp_shard {
    precision(param = PARAM, reduce = REDUCE)
    root : unit
}
"""


@pytest.mark.parametrize(
    ("param", "reduce", "refused"),
    [("fp16", "fp32", True), ("bf16", "fp16", True), ("bf16", "fp32", False)],
)
def test_training_in_fp16_is_told_and_refused(param, reduce, refused, tmp_path):
    """planc scales no loss; without gradients nothing is wrong with it."""
    text = HALF.replace("PARAM", param).replace("REDUCE", reduce)
    (tmp_path / "own.plan").write_text(text)
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    models, raised = [LlamaForCausalLM(config) for _ in range(2)], []
    models[1].load_state_dict(models[0].state_dict())
    found = planc.lower(models[0], tmp_path / "own.plan", world_size=2).findings
    lines = [d.labels[0].span.place for d in found if d.code == "PL570"]
    assert len(lines) == refused and all(place.endswith("own.plan:8") for place in lines)
    tokens = torch.arange(16).view(2, 8)
    batch = {"input_ids": tokens, "labels": tokens}

    def rank(number):
        run = planc.apply(
            models[number], tmp_path / "own.plan", device_type="cpu", require="nothing", compare=0
        )
        assert torch.isfinite(run.evaluate([batch]))
        try:
            run.forward_backward([batch])
        except planc.PlanError as error:
            raised.extend(d.code for d in error.diagnostics)

    failure = thread_ranks.run_ranks(2, rank, seconds=60)
    assert failure is None, failure.message
    assert raised == ["PL570"] * 2 * refused
