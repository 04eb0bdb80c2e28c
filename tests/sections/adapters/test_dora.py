"""DoRA: what it lowers to, the proof of its norms over ranks, and where it is refused.

In a trial magnitudes begin as the norms times 0.5 to 1.5, so that each error shows.
"""

import inspect

import pytest
from helpers import compiled_of, judged, simulated_case, slow

from planc.ops.lora import MAGNITUDE, Adapt
from planc.ops.styles import ParameterLayout, Parameters, Replicated, Shard
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.standalone import lora
from planc.simulate.simulate import simulate

pytest.importorskip("peft")

PLAN = """plan tuned for {family}

extend "{family}.plan"

adapters {{
{body}
}}
"""
LLAMA = """
    $blocks.self_attn.{q,k,v,o}_proj : lora(rank = 4, alpha = 8, dora = true)
    $blocks.mlp.{up,down}_proj       : lora(rank = 3, dora = true, rslora = true)
    lm_head                         : lora(rank = 3, dora = true)
"""
GPT2 = (
    "    transformer.h.*.{attn.c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj} : "
    "lora(rank = 4, dora = true)"
)
PHI3 = "    $blocks.*.{qkv_proj,o_proj,gate_up_proj,down_proj} : lora(rank = 4, dora = true)"


@pytest.fixture
def plan(tmp_path):
    """Writes a plan with these rules of adapters."""

    def write(body, family="llama"):
        path = tmp_path / "tuned.plan"
        path.write_text(PLAN.format(family=family, body=body))
        return path

    return write


def outcome(model, path, settings, change=None, world=4):
    """What layout flow finds on threads, after a change of the lowered plan."""
    case = simulated_case(model, path, settings, world=world)
    lowered = case.compiled.lowered
    return simulate(case.model.builder(), change(lowered) if change else lowered)


def magnitudes(lowered):
    """The styles of magnitudes, by the layer's name."""
    return {
        op.modules.path[-3]: op.style
        for op in lowered.find_ops(Parallelize)
        if MAGNITUDE in op.modules.path
    }


# Meaning -----------------------------------------------------------------------------------------


def test_magnitudes_are_of_the_features_that_a_rank_has(plan):
    found = magnitudes(compiled_of("llama-3.1-8b", plan(LLAMA), ["tp=2"]).lowered)
    rows = Parameters(layouts=(("weight", ParameterLayout(layout=Shard(0))),))
    assert found == {
        **dict.fromkeys(["q_proj", "k_proj", "v_proj", "up_proj"], rows),
        **dict.fromkeys(["o_proj", "down_proj"], Replicated(summed=True)),
    }
    whole = magnitudes(compiled_of("llama-3.1-8b", plan(LLAMA), ["tp=2", "sequence=false"]).lowered)
    assert whole == dict.fromkeys(["q_proj", "k_proj", "v_proj", "up_proj"], rows)


def test_magnitudes_of_a_fused_weight_are_cut_in_its_parts(plan):
    lowered = compiled_of("phi-3-mini", plan(PHI3, "phi3"), ["tp=2"]).lowered
    own = magnitudes(lowered)["gate_up_proj"].layouts
    ((_, layout),) = own
    bases = [
        op.style
        for op in lowered.find_ops(Parallelize)
        if op.modules.path[-2:] == ("gate_up_proj", "base_layer")
    ]
    assert layout.parts == bases[0].parts != 1


def test_the_operation_says_it(plan):
    ops = compiled_of("llama-3.1-8b", plan(LLAMA), ["tp=2"]).lowered.find_ops(Adapt)
    assert [op.headline() for op in ops] == [
        "lora, rank 4, alpha 8, dora",
        "lora, rank 3, alpha 3, rslora, dora",
        "lora, rank 3, alpha 3, dora",
    ]


# The proof ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "family", "body", "settings"),
    [
        ("llama-3.2-1b", "llama", LLAMA.replace("    lm_head", "    # lm_head"), ["tp=2"]),
        slow("llama-3.1-8b", "llama", LLAMA, ["tp=2", "sequence=false"]),
        slow("llama-3.1-8b", "llama", LLAMA, ["tp=2", "cp=2"]),
        slow("llama-3.1-8b", "llama", LLAMA, ["pp=2", "tp=2", "microbatches=4"]),
        slow("llama-3.1-8b", "llama", LLAMA, ["pp=2", "microbatches=4", "schedule=zero_bubble"]),
        slow("llama-3.1-8b", "llama", LLAMA.replace("dora", "dropout = 0.1, dora"), ["tp=2"]),
        slow("phi-3-mini", "phi3", PHI3, ["tp=2"]),
        ("gpt2", "gpt2", GPT2.replace("dora", "dropout = 0.1, dora"), ["tp=2"]),
    ],
)
def test_it_is_proved(plan, model, family, body, settings):
    found = outcome(model, plan(body, family), settings)
    assert (found.verdict, found.discrepancies) == ("proved", ()), found


NORMS = "else Partial()", "else Replicate()"
BIAS = "plain = plain - ", "plain = plain - 0 * "
CONSTANT = "with torch.no_grad():", "with torch.enable_grad():"
LOW_RANK = "+ scale * low_rank", "+ low_rank"


@pytest.mark.parametrize("wrong", [NORMS, BIAS, CONSTANT, LOW_RANK])
def test_a_wrong_computation_is_refuted(plan, monkeypatch, wrong):
    """Norms of a rank's columns, a bias that is scaled, norms with a gradient, a factor left out:
    of the ranks alone, as the single process computes with peft.
    """
    source = inspect.getsource(lora.DoraOverRanks)
    assert source.count(wrong[0]) == 1
    space = dict(vars(lora))
    exec(source.replace(*wrong), space)
    monkeypatch.setattr(lora, "DoraOverRanks", space["DoraOverRanks"])
    assert outcome("gpt2", plan(GPT2, "gpt2"), ["tp=2"]).verdict == "refuted"


def restyled(lowered, change):
    """The lowered plan with other styles of magnitudes; None leaves one out."""

    def every(ops):
        for op in ops:
            inside = isinstance(op, Parallelize) and MAGNITUDE in op.modules.path
            yield from change(op) if inside else (op,)

    return lowered.map_ops(every)


def test_gradients_of_magnitudes_that_are_not_summed_are_refuted(plan):
    body = "    $blocks.self_attn.o_proj : lora(rank = 4, dora = true)"
    path = plan(body)
    dropped = outcome(
        "llama-3.1-8b", path, ["tp=2"], lambda lowered: restyled(lowered, lambda op: ())
    )
    assert dropped.verdict == "refuted"
    assert {d.kind for d in dropped.discrepancies} == {"partial"}


def test_gradients_of_magnitudes_that_are_summed_twice_are_refuted(plan):
    body = "    $blocks.self_attn.o_proj : lora(rank = 4, dora = true)"

    def doubled(lowered):
        def every(ops):
            for op in ops:
                yield op
                if isinstance(op, Parallelize) and op.modules.path[-2:] == ("o_proj", "base_layer"):
                    path = (*op.modules.path[:-1], MAGNITUDE, "default")
                    inner = type(op.modules)(path, op.modules.module)
                    yield Parallelize(
                        modules=inner, axes=op.axes, style=Replicated(summed=True), origin=op.origin
                    )

        return lowered.map_ops(every)

    found = outcome("llama-3.1-8b", plan(body), ["tp=2", "sequence=false"], doubled)
    assert found.verdict == "refuted"


# What is refused ---------------------------------------------------------------------------------

MESH = "plan t for llama\nmesh {\n dp_shard = auto\n tp = 2\n}\n"
UNITS = "fsdp on dp_shard {\n model.layers.* : unit\n root : unit\n}\n"
Q = "model.layers.*.self_attn.q_proj"
O_PROJ = "model.layers.*.self_attn.o_proj"


@pytest.mark.parametrize(
    ("sections", "code", "words"),
    [
        (f"adapters {{\n {Q} : qlora(rank = 4, dora = true)\n}}\n", "PL010", "4-bit"),
        ("adapters {\n model.embed_tokens : lora(rank = 4, dora = true)\n}\n", "PL180", "DoRA"),
        (
            f"adapters {{\n {Q} : lora(rank = 4, dora = true)\n}}\n"
            f"train {{\n {Q} : trainable\n}}\n",
            "PL180",
            "the layer itself trains",
        ),
        (
            f"adapters {{\n {Q} : lora(rank = 4, dora = true)\n units = own\n}}\n",
            "PL186",
            "separate unit",
        ),
        (
            f"tensor on tp {{\n {O_PROJ} : rowwise(-> shard(-1))\n}}\n"
            f"adapters {{\n {O_PROJ} : lora(rank = 4, dora = true)\n}}\n",
            "PL184",
            "the norms of DoRA",
        ),
    ],
)
def test_it_is_refused(sections, code, words):
    _, _, findings = judged(f"{MESH}{sections}{UNITS}")
    assert [words in d.message for d in findings if d.code == code] == [True], findings
