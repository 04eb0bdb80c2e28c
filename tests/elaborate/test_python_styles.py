"""Styles of a plan's own: read without running anything, imported only where code is allowed."""

import ast
import sys

import pytest
import torch
from helpers import simulated
from torch import distributed

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.emit.python.script import render
from planc.emit.text import render as text_of
from planc.ops.document import dumps, loads

PLAN = """plan own for llama
style vocab = python "own_styles:Split"
mesh {
    dp_shard = auto
    tp       = 2
}
tensor on tp {
    model.embed_tokens : rowwise
    lm_head            : vocab(gather = true, note = "head", sizes = [1, 2])
}
fsdp on dp_shard {
    root : unit
}
"""


@pytest.fixture
def plan(tmp_path):
    sys.modules.pop("own_styles", None)
    path = tmp_path / "own.plan"
    path.write_text(PLAN)
    return path


def compiled(path):
    sink = Sink()
    found = compile_plan("llama-3.2-1b", str(path), sink, world_size=4)
    return found, sink


def test_checking_runs_no_code(plan):
    verdict, found = simulated("llama-3.2-1b", plan, [], world=4)
    assert verdict.verdict == "unknown"
    assert "own_styles:Split is custom code" in verdict.reason
    assert [d.code for d in found if d.severity == "warning" and d.code == "PL504"]
    assert "own_styles" not in sys.modules


def test_allowed_code_is_simulated(plan):
    verdict, _ = simulated("llama-3.2-1b", plan, [], world=4, allow_code=True)
    assert verdict.verdict == "proved"
    assert sys.modules["own_styles"].imported[0] == (True, "head", [1, 2])
    plan.write_text(PLAN.replace("gather = true", "gather = false"))
    verdict, _ = simulated("llama-3.2-1b", plan, [], world=4, allow_code=True)
    assert verdict.verdict == "refuted"


def test_it_is_in_the_text_the_document_and_the_script(plan):
    lowered = compiled(plan)[0].lowered
    assert lowered.code == ("own_styles:Split",)
    text = 'gather = true, note = "head", sizes = [1, 2]'
    assert text in text_of(lowered, digest="0" * 64)
    assert loads(dumps(lowered), "x", Sink()) == lowered
    source = render(lowered, digest="0" * 64)
    assert 'own_styles.Split(gather=True, note="head", sizes=[1, 2])' in source
    assert "import own_styles\nimport torch\n" in source or "import own_styles\nfrom" in source
    ast.parse(source)
    assert "own_styles" not in sys.modules


@pytest.fixture
def fake():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


def small():
    import transformers

    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_apply_asks_first(plan, fake):
    model = small()
    with pytest.raises(PlanError) as caught:
        planc.apply(model, str(plan), device_type="cpu")
    assert [d.code for d in caught.value.diagnostics] == ["PL172"]
    assert "own_styles" not in sys.modules
    assert type(model.lm_head.weight) is torch.nn.Parameter
    planc.apply(model, str(plan), device_type="cpu", allow_code=True)
    assert sys.modules["own_styles"].imported


@pytest.mark.parametrize(
    ("path", "words"),
    [("own_styles:NoStyle", "is not a torch"), ("own_styles:Nothing", "has no attribute")],
)
def test_what_cannot_be_imported(plan, fake, path, words):
    plan.write_text(PLAN.replace("own_styles:Split", path))
    model = small()
    with pytest.raises(PlanError) as caught:
        planc.apply(model, str(plan), device_type="cpu", allow_code=True)
    assert caught.value.diagnostics[0].code == "PL172"
    assert words in caught.value.diagnostics[0].message
    assert type(model.lm_head.weight) is torch.nn.Parameter
