"""The kernels of layers: what a profile keeps, how fast it is, and which one is assumed."""

from dataclasses import replace

import pytest
from measured_tables import accelerator, hardware, stack

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load
from planc.tools.estimate import kernels, profiles
from planc.tools.estimate.answer import Request, answer_for, document, text
from planc.tools.estimate.counted import MicroBatch
from planc.tools.estimate.from_plan import Batch
from planc.tools.estimate.fused_kernels import fuse
from planc.tools.estimate.kept_tensors import count
from planc.tools.estimate.step_time import Passes
from planc.tools.estimate.workload import Attention, Group, Layer, Matmul, Workload

TOKENS = 4096


def profile(name):
    return profiles.kernels(name, Sink())


def kept(model, name, at=-1):
    """Bytes that the last kind of layer keeps for a token."""
    facts = load(model, Sink())
    counted = count(facts, Sink(), MicroBatch(1, TOKENS, "bfloat16"))
    layer = [part for part in fuse(counted, facts, profile(name), TOKENS, 2).parts if part.at][at]
    return sum(saved.size for saved in layer.saved) / TOKENS


def attention(hidden, queries, keys):
    """The formula of Korthikanti et al. 2022 with a norm and flash attention, in 16 bits."""
    return 4 * hidden + 2 * (queries + 2 * keys) + 2 * queries


def latent_attention(hidden, heads, ranks, keys, values):
    return 4 * hidden + 4 * ranks + 2 * heads * (2 * keys + values) + 2 * heads * values


def gated(hidden, inner):
    return 4 * hidden + 6 * inner


def experts(hidden, number, chosen, inner, shared=0):
    return 4 * hidden + 8 * number + chosen * (2 * hidden + 6 * inner) + 6 * shared


@pytest.mark.parametrize(
    ("model", "formula"),
    [
        ("llama-3.1-8b", attention(4096, 4096, 1024) + gated(4096, 14336)),
        ("qwen3-30b-a3b", attention(2048, 4096, 512) + experts(2048, 128, 8, 768)),
        (
            "deepseek-v3",
            latent_attention(7168, 128, 1536 + 512 + 64, 192, 128)
            + experts(7168, 256, 8, 2048, 2048),
        ),
    ],
)
def test_fused_layers_keep_what_formulas_say(model, formula):
    heads = 2 * (4096 + 512) if model == "qwen3-30b-a3b" else 0  # queries and keys before norms
    assert kept(model, "fused") == pytest.approx(formula + heads, rel=0.01)


def test_compiled_layers_compute_norms_and_activations_again():
    fused, compiled = (kept("llama-3.1-8b", name) for name in ("fused", "compiled"))
    assert fused - compiled == pytest.approx(2 * 2 * 4096 + 2 * 14336)
    assert kept("llama-3.1-8b", "eager") > 1.4 * fused


def test_eager_layers_are_as_counted():
    facts = load("llama-3.1-8b", Sink())
    counted = count(facts, Sink(), MicroBatch(1, TOKENS, "bfloat16"))
    assert fuse(counted, facts, profile("eager"), TOKENS, 2) is counted
    assert profile("eager") == profiles.EAGER


def test_attention_is_slower_for_short_rows():
    machine, made = hardware("h100-8x"), profile("fused")
    rates = []
    for length in (4096, 131072):
        part = Attention(batch=1, heads=32, queries=length, keys=length, head_dim=128)
        seconds = kernels.attention(part, machine, layer_kernels=made)
        rates.append(part.kernel_flops / (seconds - machine.kernel_us * 1e-6) / 1e12)
    expected = [0.91 * 720 * n / (n + 550) for n in (4096, 131072)]
    assert rates == pytest.approx(expected)


def test_attention_is_as_fast_as_measured():
    """By cuDNN on one H100, with the heads of an 8B: both passes."""
    errors = []
    for name, rows, heads, _, length, head, *measured in accelerator("h100")[
        "sdpa_causal_ms_forward_backward"
    ]:
        if (name, heads, head) == ("cudnn", 32, 128):
            part = Attention(batch=rows, heads=heads, queries=length, keys=length, head_dim=head)
            for ms, back in zip(measured, (False, True), strict=True):
                seconds = kernels.attention(
                    part, hardware("h100-8x"), layer_kernels=profile("fused"), backward=back
                )
                errors.append(abs(seconds * 1e3 / ms - 1))
    assert len(errors) == 12 and max(errors) < 0.12


def test_grouped_products_share_waves_of_tiles():
    """32 experts of 1,024 rows take the waves of one product of 32,768 rows."""
    machine = hardware("h100-8x")
    grouped = Matmul(m=1024, n=5760, k=2880, count=32, grouped=True)
    whole = kernels.matmul(Matmul(m=32 * 1024, n=5760, k=2880), machine)
    assert kernels.matmul(grouped, machine) == pytest.approx(whole)
    assert kernels.matmul(replace(grouped, grouped=False), machine) > 1.2 * whole


def test_the_host_launches_products_of_each_expert():
    layer = Layer(
        name="some", parameters=1, matmuls=(Matmul(m=1, n=1, k=1, count=16, grouped=True),)
    )
    work = Workload(stages=(((layer, 1),),), data=Group(name="data", size=1), tokens=1)
    software = stack("torch").with_kernels(profile("fused"))
    passes = Passes(work, hardware("h100-8x"), software)
    assert passes.host_ms(layer) == pytest.approx(7.3 + 16 * 0.12)


def test_grouped_products_of_few_rows_are_slower():
    machine, software = hardware("h100-8x"), stack("torch").with_kernels(profile("fused"))
    few = Matmul(m=1700, n=4096, k=4096, count=8, grouped=True)
    expected = 2 * kernels.matmul(few, machine) / profile("fused").matmul_pace
    assert kernels._product_seconds(few, machine, software) == pytest.approx(expected)


PLAN = """plan own for llama
mesh {
    dp_shard = auto
}
SECTION
fsdp on dp_shard {
    root : unit
}
"""


def estimated(tmp_path, section="", **choices):
    path = tmp_path / "own.plan"
    path.write_text(PLAN.replace("SECTION", section))
    compiled = compile_plan("llama-3.1-8b", str(path), Sink(), world_size=8)
    batch = Batch(global_batch=8, sequence=TOKENS)
    return answer_for(compiled, Request(batch=batch, **choices), Sink())


def test_the_plan_decides_which_kernels_are_assumed(tmp_path):
    section = "compile {\n    model.layers.* : block\n}\n"
    eager, compiled = estimated(tmp_path), estimated(tmp_path, section)
    fused = estimated(tmp_path, section, layer_kernels="fused")
    for made, name in ((eager, "eager"), (compiled, "compiled"), (fused, "fused")):
        assert [*text(made)][1].startswith(f"counted with {name} kernels; ")
        assert document(made)["kernels"] == name
    sizes = [made.estimate.fullest.peak for made in (eager, fused, compiled)]
    assert sizes == sorted(sizes, reverse=True)
    assert compiled.estimate.time.seconds < eager.estimate.time.seconds


def test_mfu_with_the_causal_half(tmp_path):
    time = estimated(tmp_path).estimate.time
    square = 4 * 32 * TOKENS * 128 * 32  # of a token's attention in 32 layers
    linear = 2 * (8_030_261_248 - 128256 * 4096)
    expected = (linear + square / 2) / (linear + square)
    assert time.causal_mfu / time.mfu == pytest.approx(expected, rel=0.001)


def test_a_bidirectional_model_attends_to_all():
    facts = load("bert-base", Sink())
    parts = count(facts, Sink(), MicroBatch(1, 128, "bfloat16")).parts
    assert {a.causal for part in parts for a in part.attended} == {False}


def test_attention_with_a_mask_is_causal_and_computes_all_keys():
    """As of the ranks of a context axis, which have a part of the queries."""
    facts = load("llama-3.1-8b", Sink())
    batches = MicroBatch(1, 128, "bfloat16"), MicroBatch(1, 128, "bfloat16", ("all_gather", 2, 1))
    whole, part = (
        {(a.causal, a.masked) for part in count(facts, Sink(), batch).parts for a in part.attended}
        for batch in batches
    )
    assert whole == {(True, False)} and part == {(True, True)}


def test_no_such_kernels(tmp_path):
    sink = Sink()
    assert profiles.kernels("fast", sink) is None
    assert "name one of compiled, eager, fused" in next(iter(sink)).help
