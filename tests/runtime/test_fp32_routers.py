"""Mixtures whose routers stay in fp32 in a model of bf16, under the plans of their families."""

import pytest
import torch
import transformers
from families import FAMILIES
from helpers import facts
from torch.nn.functional import cross_entropy

import planc
from planc.compiler import compile
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.simulate.thread_ranks import run_ranks
from planc.syntax.parse import parse
from planc.syntax.plan_files import read_for

RANKS = 2
ROUTER = "model.layers.1.mlp.gate.weight"
ROUNDED = """plan rounded for any
extend "{plan}"

fsdp on dp_shard_cp, replicate on dp_replicate {{
    dtype(fp32) : unit(precision(param = bf16))
}}
"""


def mixture(family):
    """A model of bf16 whose router is in fp32: 5.23 has it in Ernie, 5.24 in DeepSeek too."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    router = model.get_parameter(ROUTER)
    router.data = torch.randn(router.shape)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    return model.train()


def step(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits
    cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
    return logits.detach()


def gradients_of(model):
    """The full gradients by the names that parameters have in one process."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name.replace("_checkpoint_wrapped_module.", ""), parameter.grad.full_tensor()


def trained(family, plan):
    """The largest error of each rank's logits, and of gradients, with those of one process."""
    tokens = torch.randint(0, 128, (RANKS, 2, 16), generator=torch.Generator().manual_seed(0))
    single = mixture(family)
    right = [step(single, part) for part in tokens]
    models, errors = [mixture(family) for _ in range(RANKS)], {}

    def rank(number):
        model = models[number]
        planc.apply(model, plan, device_type="cpu")
        errors["logits", number] = (step(model, tokens[number]) - right[number]).abs().max()
        for name, gradient in gradients_of(model):
            wanted = single.get_parameter(name).grad.float() / RANKS
            assert gradient.dtype == single.get_parameter(name).dtype
            errors[name, number] = (gradient.float() - wanted).norm() / wanted.norm()

    failure = run_ranks(RANKS, rank, 60)
    assert failure is None, failure.error or failure.message
    logits = max(float(e) for (name, _), e in errors.items() if name == "logits")
    return logits, max(float(e) for (name, _), e in errors.items() if name != "logits")


@pytest.mark.parametrize(
    ("family", "plan"), [("deepseek_v3", "deepseek_v3"), ("glm4_moe", "qwen3_moe")]
)
def test_a_router_computes_in_fp32_as_in_one_process(family, plan, tmp_path):
    assert trained(family, plan) == (0.0, 0.0)
    rounded = tmp_path / "rounded.plan"  # decides before the plan that it extends
    rounded.write_text(ROUNDED.format(plan=plan))
    logits, gradients = trained(family, str(rounded))
    assert logits > 1e-3 and gradients > 1e-3


CAST = "plan mine for any\nload {\n    dtype = bf16\n}\n"


@pytest.mark.parametrize("shape", ["deepseek-v3", "ernie-4.5-21b-a3b", "glm-4.5-air", "kimi-k2"])
def test_shipped_plans_give_routers_a_unit(shape):
    sink, model = Sink(), facts(shape)
    files = (*read_for(model.names, sink), parse(Source("cast.plan", CAST), sink))
    compile(files, model, sink, world_size=16)
    assert [d.code for d in sink if d.severity == "error"] == []


def test_a_parameter_beside_modules_of_another_dtype_has_no_unit():
    sink, model = Sink(), facts("deepseek-v4-flash")
    files = (*read_for(model.names, sink), parse(Source("cast.plan", CAST), sink))
    compile(files, model, sink, world_size=16)
    findings = [d for d in sink if d.severity == "error"]
    assert {d.code for d in findings} == {"PL415"}
    helps = {d.help for d in findings}
    assert any("that of `model.layers[0:2].self_attn.sinks` has both" in help for help in helps)
