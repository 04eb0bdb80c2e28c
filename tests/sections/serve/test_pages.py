"""The shipped pages of engines agree with the engines' own model files."""

import json
import re
from pathlib import Path

import pytest
from engine_classes import families_of
from tiny_engines import facts_of, tiny_config

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.ir.engine_layout import EngineLayout
from planc.ir.serving import STACKS, serving_of
from planc.model.config import shipped_models
from planc.model.load import load
from planc.model.sources.huggingface import defaults

READ = json.loads((Path(__file__).parent / "engine_classes.json").read_text())
WHOLE = re.compile(
    r"\.(gate|router|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|embed_positions)\.weight$|norm"
)
"""Tensors of two dims or more that engines hold complete, and norms."""
PARAMETERS = {"sinks", "q_norm", "k_norm"}
"""Heads' own parameters, divided by a loader that is no layer's: `row_parallel_weight_loader` of
commandr.py for norms of single heads, and gpt_oss.py's own for attention sinks.
"""


def models_of(engine):
    """The facts of all shipped models of a page's families, and of tiny ones of the others."""
    shipped = [load(model, Sink()) for model in shipped_models()]
    known = families_of(engine)
    models = [
        facts
        for facts in shipped
        if facts and facts.name.endswith("ForCausalLM") and facts.family in known
    ]
    others = {*known} - {facts.family for facts in models}
    return [*models, *(facts_of(tiny_config(family)) for family in sorted(others))]


@pytest.mark.parametrize("engine", READ)
def test_rules_are_those_of_the_engine(engine):
    """Each rule has the class of the engine's attribute and its parts; what no rule names is
    replicated there, and no large weight is forgotten.
    """
    seen = set()
    for facts in models_of(engine):
        model, sink = facts.family, Sink()
        sets = ["tp=2", "dtype=bf16"]
        done = compile_plan(facts, f"serve/{engine}.plan", sink, settings=sets)
        assert not sink.has_errors, (model, [*sink])
        seen.add(model)
        layout = EngineLayout(serving_of(done.plan), facts, sink)
        assert READ[engine]["version"].startswith(layout.serving.version)
        read, stacks = READ[engine][model], set()
        kinds = {attribute: kind for attribute, (kind, _) in read["layers"].items()}
        for tensor in layout.hub.values():
            found = [
                m for n, r in enumerate(layout.serving.rules) if (m := layout._match(n, r, tensor))
            ]
            name = layout.serving.engine_name(tensor.name)
            if not found:
                kind = kinds.get(name.split(".")[-2], "")
                own = read["dtypes"].keys() & {*name.split(".")[-2:]}
                assert not own or tensor.dtype == "float32", (model, tensor.name)
                assert kind in ("", "whole"), (model, tensor.name)
                assert len(tensor.shape) < 2 or kind or WHOLE.search(name), (model, tensor.name)
                continue
            [(number, end, _, expert)] = found
            rule = layout.serving.rules[number]
            attribute = layout.serving.engine_name(end).rpartition(".")[2]
            if expert is not None or rule.kind in STACKS:
                stacks.add(rule.kind)
            elif rule.kind == "replicate":
                assert rule.dtype == read["dtypes"][attribute], (model, tensor.name)
                assert kinds.get(attribute, "whole") == "whole"
            elif attribute in PARAMETERS:
                assert attribute not in kinds and rule.kind == "column"
            elif rule.kind != "whole":
                assert kinds[attribute] == rule.kind, (model, tensor.name)
            if rule.kind in ("qkv", "merged") and rule.parts:
                assert read["fused"][attribute] == [*rule.parts], (model, attribute)
        assert not stacks or engine == "sglang" or kinds["experts"] == "experts"
    assert seen == {*families_of(engine)}


STYLES = {"colwise": "column", "rowwise": "row", "replicated": None}


def test_rules_are_those_of_transformers():
    """Each rule is the style of `base_model_tp_plan`, and weights without a style have no rule."""
    seen = set()
    for facts in models_of("transformers"):
        model = facts.family
        if facts.config.get("tie_word_embeddings"):
            continue
        done = compile_plan(facts, "serve/transformers.plan", sink := Sink(), settings=["tp=2"])
        assert not sink.has_errors, (model, [*sink])
        styles = {f"model.{name}": style for name, style in defaults(facts.family)[0].items()}
        styles["lm_head"] = "colwise_gather_output"
        layout = EngineLayout(serving_of(done.plan), facts, sink)
        rules = layout.serving.rules
        for tensor in layout.hub.values():
            found = [m for n, r in enumerate(rules) if (m := layout._match(n, r, tensor))]
            kinds = [rules[number].kind for number, *_ in found]
            style = styles.get(tensor.module.replace("{}", "*"), "replicated").partition("_")[0]
            assert kinds == [STYLES[style]] * (STYLES[style] is not None), (model, tensor.name)
        seen.add(facts.family)
    assert len(seen) > 12


def test_another_family_is_refused():
    sink = Sink()
    compile_plan("gpt2", "serve/vllm.plan", sink)
    assert any(d.code == "PL110" and "were not read" in d.message for d in sink)


def test_a_plan_that_extends_a_page_states_sizes(tmp_path):
    plan = tmp_path / "mine.plan"
    text = 'plan mine for llama\n\nextend "serve/vllm.plan"\n\nserve vllm on tp = 8 {\n}\n'
    plan.write_text(text)
    done = compile_plan("llama-3.1-8b", str(plan), sink := Sink())
    assert not sink.has_errors and serving_of(done.plan).tp == 8
