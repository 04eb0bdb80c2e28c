"""Faults seeded into inferred layouts: layout flow, which knows no inference, refutes each."""

from dataclasses import replace

import pytest
from helpers import sampled
from inferred import compiled_for, plan_of

from planc.diagnostics.diagnostic import Sink
from planc.infer.apply_adapters import adapt_plan
from planc.lowering import lower
from planc.model.load import load
from planc.ops import styles as st
from planc.ops.styles import Replicate, Shard
from planc.proof.judge import judge
from planc.proof.small_case import SmallCase, small_model


def found(rules, kind, name):
    """The first inferred rule of a style on modules of a name."""
    some = (r for r in rules if r.inferred and isinstance(r.style, kind))
    return next(r for r in some if name in str(r.modules))


def without(kind, name=""):
    """The rules but for one that is inferred."""

    def fault(rules):
        gone = found(rules, kind, name)
        return [r for r in rules if r is not gone]

    return fault


def other(kind, change, name=""):
    """The rules with another style in the place of an inferred one."""

    def fault(rules):
        old = found(rules, kind, name)
        return [replace(r, style=change(r.style)) if r is old else r for r in rules]

    return fault


def moved(kind, name, target):
    """The rules with an inferred one on another child of the blocks."""

    def fault(rules):
        old = found(rules, kind, name)
        at = next(r.modules for r in rules if str(r.modules).endswith(target))
        return [replace(r, modules=at) if r is old else r for r in rules]

    return fault


def one_block_less(kind, name):
    """The rules, of which one is not on the first block: it has those of no other block."""

    def fault(rules):
        old = found(rules, kind, name)
        rest = old.modules.with_entries(
            old.modules.entries - type(old.modules.entries).from_numbers([0])
        )
        return [replace(r, modules=rest) if r is old else r for r in rules]

    return fault


def dim(number):
    return lambda style: replace(style, dim=number)


def local(value):
    return lambda style: replace(style, local=value)


def whole(style):
    return replace(style, output=Replicate(), local=True)


def left_split(style):
    return replace(style, output=Shard(-1))


def fewer(style):
    return st.MlaKv(rope=style.rope // 2)


LLAMA, QWEN = ("llama-3.1-8b", "llama", True), ("qwen3-8b", "qwen3", True)
MIXTRAL, LATENT = ("mixtral-8x7b", "mixtral", True), ("deepseek-v3", "deepseek_v3", False)
FAULTS = [
    (*QWEN, "a sum left out", without(st.Sequence, "q_norm")),
    (*QWEN[:2], False, "a sum left out", without(st.Sequence, "k_norm")),
    (*LATENT, "rotary features not summed", without(st.MlaKv)),
    (*LATENT, "fewer rotary features", other(st.MlaKv, fewer)),
    (*LLAMA, "a norm without its sum", without(st.Sequence, "input_layernorm")),
    (*LLAMA, "a gather at another module", moved(st.Input, ".mlp", "o_proj")),
    (*LLAMA, "no cut", other(st.Rowwise, whole, "down_proj")),
    (*LLAMA, "a head that is not gathered", other(st.Colwise, left_split, "lm_head")),
    (*LLAMA, "a block's norm without its sum", one_block_less(st.Sequence, "input_layernorm")),
    (*MIXTRAL, "experts on parts", without(st.Input, "mlp")),
    (*MIXTRAL, "an output that is not cut", without(st.Output, "mlp")),
    (*MIXTRAL, "a gather that sums twice", other(st.Input, local(False), "mlp")),
    ("gpt2", "gpt2", True, "a whole position table", without(st.Output, "wpe")),
]

EQUAL = [
    (*LLAMA, "each projection gathers by itself", without(st.Input, "mlp")),
    (*LLAMA, "each projection sums its gradient", other(st.Input, local(True), "mlp")),
    (*LLAMA, "a norm on another dim", other(st.Sequence, dim(2), "input_layernorm")),
    (*QWEN, "heads at another dim of a local tensor", other(st.Sequence, dim(1), "q_norm")),
]
"""What torch redistributes to the same numbers."""


def small(model, plan, sequence):
    """The plan with inferred layouts for the small model."""
    facts = load(model, Sink())
    made = small_model(facts)
    known = made.facts(facts, Sink())
    base, _ = compiled_for(known, plan, sequence)
    done, errors = plan_of(base, known, sequence)
    assert done is not None, errors
    return SmallCase(model=made, compiled=done)


def judged(case, rules):
    plan = replace(case.compiled.plan, tensor=tuple(rules))
    applied = adapt_plan(plan, case.compiled.facts)
    compiled = replace(case.compiled, plan=plan, applied=applied, lowered=lower(*applied))
    return judge(replace(case, compiled=compiled), quick=True).verdict


@pytest.mark.parametrize(("model", "plan", "sequence", "what", "fault"), sampled(FAULTS, 4))
def test_a_fault_of_inference_is_refuted(model, plan, sequence, what, fault):
    case = small(model, plan, sequence)
    rules = list(case.compiled.plan.tensor)
    assert judged(case, rules) == "proved"
    assert judged(case, fault(rules)) == "refuted", what


@pytest.mark.parametrize(("model", "plan", "sequence", "what", "change"), sampled(EQUAL, 4))
def test_what_torch_redistributes_is_no_fault(model, plan, sequence, what, change):
    case = small(model, plan, sequence)
    assert judged(case, change(list(case.compiled.plan.tensor))) == "proved", what
