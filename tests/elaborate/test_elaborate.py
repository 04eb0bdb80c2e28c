"""Elaboration: what a plan means, where it is compared as objects; tests/specs has the rest."""

import pytest
from helpers import STATED, codes, elaborated

from planc.compiler import complete_plan
from planc.diagnostics.diagnostic import Sink
from planc.elaborate.sections.tensor_styles import STYLES, equivalent
from planc.lowering import lower
from planc.model.load import load
from planc.ops.styles import style_text
from planc.syntax.plan_files import read

PLAN = """
plan t for llama

mesh {
    pp       = 1
    dp_shard = auto
    tp       = 1
}

fsdp on dp_shard {
    UNITS
}
"""


# Selectors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "plan", "layers"),
    [("gemma-3-1b", str(STATED / "gemma3.plan"), 26), ("gemma-2-9b", "gemma2", 42)],
    ids=["stated", "inferred"],
)
def test_layers_that_differ_are_one_set_where_they_are_alike(model, plan, layers):
    """gemma's sliding and full layers differ as blocks, not in their projections."""
    sink = Sink()
    facts = load(model, sink)
    made = complete_plan(read(plan, sink), facts, sink, world_size=8, settings=["tp=2"])
    assert codes(sink) == []
    found = {str(r.modules) for r in made.tensor}
    assert f"model.layers[0:{layers}].self_attn.q_proj" in found


# Styles ------------------------------------------------------------------------------------------


def test_every_style_of_transformers_has_an_equivalent():
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    words = set(ALL_PARALLEL_STYLES.keys())
    assert {"colwise_rep", "grouped_gemm", "moe_tp_experts"} < words
    assert [w for w in words if w not in STYLES and equivalent(w) is None] == []
    assert equivalent("zork") is None


@pytest.mark.parametrize(
    "style",
    [
        "colwise(shard(1) -> replicate)",
        "sequence(dim = 2, local = true)",
        "input(shard(1) -> replicate, null, mask = replicate -> shard(0), local = true)",
    ],
)
def test_a_style_prints_as_it_is_written(style):
    section = f"tensor on tp {{\n    lm_head : {style}\n}}\n"
    plan, *_ = elaborated(PLAN.replace("UNITS", "root : unit") + section, settings=["tp=2"])
    assert style_text(plan.tensor[0].style) == style


@pytest.mark.parametrize("setting", ["", "    sequence = auto\n"], ids=["stated", "inferred"])
def test_a_rule_knows_its_style_as_written(setting):
    """A help for another plan quotes it; the selector may have a colon too."""
    rule = "model.layers[0:4].mlp.up_proj : colwise(parts = config.num_hidden_layers // 16)"
    section = f"tensor on tp {{\n{setting}    {rule}\n    lm_head : colwise\n}}\n"
    plan, *_ = elaborated(PLAN.replace("UNITS", "root : unit") + section, settings=["tp=2"])
    written = {str(r.modules): r.written.text for r in plan.tensor if r.written.text}
    assert written == {
        "model.layers[0:4].mlp.up_proj": "colwise(parts = config.num_hidden_layers // 16)",
        "lm_head": "colwise",
    }


# Loading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "text", "kept"),
    [(1, "", True), (2, "", False), (2, "(reshard = always)", True), (2, "(reshard = 2)", 2)],
)
def test_units_of_pipeline_stages_keep_their_parameters(stages, text, kept):
    """By default: what one microbatch let go the next would gather again."""
    units = PLAN.replace("UNITS", f"model.layers.* : unit{text}")
    plan, *_ = elaborated(units, settings=[f"pp={stages}"])
    assert {u.reshard for u in plan.fsdp.units} == {kept}


# Extending ---------------------------------------------------------------------------------------


def test_a_name_that_no_file_can_have():
    sink = Sink()
    assert read("x\0y", sink) == ()
    assert [d.code for d in sink] == ["PL006"]


# Lowering ----------------------------------------------------------------------------------------


def test_bytes_add_up():
    """Without sharding a rank holds the whole model: 8,030,261,248 parameters of two bytes."""
    for world in (1, 8):
        plan, llama, _ = elaborated(PLAN.replace("UNITS", "root : unit"), world=world)
        size = {"bfloat16": 2, "float32": 4}[llama.root.children[1].module.parameters[0].dtype]
        assert lower(plan, llama).parameters == 8_030_261_248 * size // world


@pytest.mark.parametrize(
    ("name", "line"), [("load", "weights = disk"), ("checkpoint", "lm_head : ops(save = 3)")]
)
def test_a_section_with_a_mistake_is_marked_so_that_nothing_judges_it(name, line):
    plan, *_ = elaborated(PLAN.replace("UNITS", "root : unit") + f"{name} {{\n    {line}\n}}\n")
    assert plan.broken == {name} and not plan.checkpoint_rules


def test_a_folder_of_weights_does_not_hide_the_shipped_plan_of_its_name(home):
    (home / "llama").mkdir()
    (home / "mine.plan").write_text('plan mine for llama\nextend "llama"\n')
    sink = Sink()
    files = read("mine.plan", sink)
    assert codes(sink) == []
    assert [file.statements[0].name for file in files] == ["blocks", "decoder", "llama", "mine"]


def test_a_plan_with_the_name_of_a_shipped_one_extends_that(home):
    (home / "llama.plan").write_text('plan mine for llama\nextend "llama.plan"\n')
    sink = Sink()
    files = read("llama.plan", sink)
    assert codes(sink) == []
    assert [file.statements[0].name for file in files] == ["blocks", "decoder", "llama", "mine"]
