"""The lines at fault of a refuted plan: the labels of a finding, and the edit in its help."""

import re
from dataclasses import replace

import pytest
from helpers import mutant

import planc
from planc.proof import remedy
from planc.syntax import plan_files
from planc.tools.init.plan_text import parsed_text

PARTIAL = ("self_attn.o_proj : rowwise\n", "self_attn.o_proj : rowwise(-> partial)\n")
WHOLE = ("tp=2", "sequence=false")


def errors(plan, *settings, model="llama-3.1-8b", world=4):
    every = planc.check(model, plan, world_size=world, overrides=settings)
    return [d for d in every if d.severity == "error"]


@pytest.mark.parametrize(
    ("old", "new", "settings", "marks", "help"),
    [
        pytest.param(
            *PARTIAL,
            WHOLE,
            ["self_attn.o_proj : rowwise(-> partial)"],
            r"give `model.layers.\*.self_attn.o_proj` the style `rowwise`, as \S+llama.plan:8",
            id="a sum that nothing adds up, seen in the norm after it",
        ),
        pytest.param(
            "mlp.{gate,up}_proj : colwise",
            "mlp.{gate,up}_proj : rowwise",
            ("tp=2",),
            ["mlp.{gate,up}_proj : rowwise"],
            r"give `model.layers.\*.mlp.{gate,up}_proj` the style `colwise`",
            id="a wrong style, seen at the input of the next layer",
        ),
        pytest.param(
            "mlp.{gate,up}_proj : colwise",
            "mlp.gate_proj : colwise",
            ("tp=2",),
            ["mlp.gate_proj : colwise"],
            r"add `model.layers.\*.mlp.up_proj : colwise`, as \S+llama.plan:7",
            id="a missing rule, which has no line of its own",
        ),
        pytest.param(
            "$head : colwise(shard(1) -> replicate)\n",
            "",
            ("tp=2",),
            ["$embedding : rowwise(-> shard(1), local = false)"],
            r"add `lm_head : colwise\(shard\(1\) -> replicate\)`, as follows from \S+r.plan:10",
            id="a missing rule, whose name is like no other",
        ),
        pytest.param(
            "mlp.{gate,up}_proj : colwise",
            "mlp.{gate,up}_proj : colwise\n        mlp.act_fn : replicate\n"
            "        override self_attn.q_proj : replicate",
            ("tp=2",),
            ["override self_attn.q_proj : replicate"],
            r"give `model.layers.\*.self_attn.q_proj` the style `colwise`",
            id="one of three layers of a line",
        ),
    ],
)
def test_the_line_to_blame(tmp_path, old, new, settings, marks, help):
    path = mutant(tmp_path, "llama", old, new)
    (error,) = errors(path, *settings)
    assert re.match(help, error.help), error.help
    assert ": then the proxy model is proved" in error.help
    assert [label.span.text for label in error.labels] == marks
    told = "a rule is missing" if help.startswith("add") else "at fault: right with `"
    assert error.labels[0].text.startswith(told)


@pytest.mark.slow
def test_two_lines_are_to_blame_where_neither_alone_is_enough(tmp_path):
    path = mutant(tmp_path, "llama", *PARTIAL)
    path.write_text(
        path.read_text().replace(
            "mlp.down_proj : rowwise\n", "mlp.down_proj : output(partial -> replicate)\n"
        )
    )
    (error,) = errors(path, *WHOLE)
    assert {label.span.text.partition(" ")[0] for label in error.labels} == {
        "self_attn.o_proj",
        "mlp.down_proj",
    }


def test_rules_that_reach_too_few_layers(tmp_path):
    old = "    $blocks {\n        self_attn.{q,k,v}_proj"
    path = mutant(tmp_path, "llama", old, old.replace("$blocks", "model.layers[0:2]"))
    (error,) = errors(path, "tp=2")
    alone = "for `model.layers[0:2]` alone"
    assert {label.text for label in error.labels} == {f"at fault: {alone}"}
    lines = [label.span.text.partition(" ")[0] for label in error.labels]
    assert len(lines) == len(set(lines)) == 7, "each rule is marked, and once"
    assert error.help.startswith(
        f"let the rules {alone} reach `model.layers[2:32]` too: then the proxy model is proved"
    )


def test_a_missing_rule_is_for_the_layers_that_lack_it(tmp_path):
    norms = "self_attn.{q,k}_norm : sequence(dim = 2, local = true)"
    path = mutant(tmp_path, "qwen3", f"$blocks.{norms}", f"model.layers[0:2].{norms}")
    (error,) = errors(path, "tp=2", model="qwen3-8b")
    assert error.labels[0].text == "at fault: for `model.layers[0:2]` alone"
    assert "reach `model.layers[2:36]` too" in error.help


@pytest.mark.parametrize(
    ("model", "plan", "old", "new", "condition"),
    [
        (
            "llama-3.1-8b",
            "llama",
            "mlp.{gate,up}_proj : colwise\n        when sequence {",
            "mlp.{gate,up}_proj : colwise\n        when not sequence {",
            "not sequence",
        ),
        (
            "qwen3-8b",
            "qwen3",
            "    $blocks.self_attn.{q,k}_norm : sequence(dim = 2, local = true)\n",
            "    when tp > 4 {\n"
            "        $blocks.self_attn.{q,k}_norm : sequence(dim = 2, local = true)\n    }\n",
            "tp > 4",
        ),
    ],
    ids=["inverted", "not met"],
)
def test_a_condition_to_blame(tmp_path, model, plan, old, new, condition):
    (error,) = errors(mutant(tmp_path, plan, old, new), "tp=2", model=model)
    assert [label.span.text for label in error.labels] == [condition]
    assert error.labels[0].text == "at fault: right the other way around"
    assert error.help.startswith(f"invert the condition `{condition}`: then the proxy model is")


def test_a_draft_where_no_plan_is_for_the_family(tmp_path, monkeypatch):
    path = mutant(tmp_path, "llama", *PARTIAL)
    monkeypatch.setattr(plan_files, "plan_of_family", lambda *_names, **_own: None)
    (error,) = errors(path, *WHOLE)
    assert "`rowwise`, as `planc init` drafts it: then" in error.help


def test_nothing_is_blamed_that_no_run_has_shown(tmp_path, monkeypatch):
    path = mutant(tmp_path, "llama", *PARTIAL)
    judge, asked = remedy.judge, []

    def refuted(case):
        asked.append(case)
        return replace(judge(case), verdict="refuted")

    monkeypatch.setattr(remedy, "judge", refuted)
    (error,) = errors(path, *WHOLE)
    assert asked and error.help is None
    assert [label.text for label in error.labels] == ["decides `embed_tokens`", "ended just before"]


def test_what_is_to_add_comes_before_rules_to_remove(tmp_path, monkeypatch):
    """A right plan that leaves attention whole is no reason to remove its right rules."""
    norms = "    $blocks.self_attn.{q,k}_norm : sequence(dim = 2, local = true)\n"
    path = mutant(tmp_path, "qwen3", norms, "")
    other = 'plan qwen3 for qwen3\nextend "decoder.plan"\ntensor on tp {\n$blocks {\n'
    other += "mlp.{gate,up}_proj : colwise\nmlp.down_proj : rowwise\n}\n}\n"
    files = parsed_text(other)
    monkeypatch.setattr(plan_files, "read_for", lambda *_args, **_own: files)
    (error,) = errors(path, "tp=2", model="qwen3-8b")
    first, _, others = error.help.partition("; or ")
    assert first == (
        "give it a style that reduces its gradient: `q_norm : replicate(gradient = sum)`"
    )
    assert others.startswith("write `sequence = auto` in the section, and planc infers such rules")
    assert "remove the rule" in others and others.endswith("then the proxy model is proved")
    assert not any("right without it" in label.text for label in error.labels)


QKV, OUT, UP, DOWN = (
    "self_attn.{q,k,v}_proj : colwise",
    "self_attn.o_proj : rowwise",
    "mlp.{gate,up}_proj : colwise",
    "mlp.down_proj : rowwise",
)
SWAPPED = {
    line: line.replace(*words)
    for line, words in {
        QKV: ("colwise", "rowwise"),
        OUT: ("rowwise", "colwise"),
        UP: ("colwise", "rowwise"),
        DOWN: ("rowwise", "colwise"),
    }.items()
}
MISTAKES = {
    "attention the wrong way around": ({QKV: SWAPPED[QKV], OUT: SWAPPED[OUT]}, {}),
    "the MLP the wrong way around": ({UP: SWAPPED[UP], DOWN: SWAPPED[DOWN]}, {}),
    "down_proj split by its outputs": ({DOWN: SWAPPED[DOWN]}, {}),
    "o_proj forgotten": ({OUT: ""}, {QKV: "self_attn.o_proj : rowwise"}),
    "up_proj forgotten": (
        {UP: "mlp.gate_proj : colwise"},
        {"mlp.gate_proj : colwise": "mlp.up_proj : colwise"},
    ),
}
"""What is written instead of right lines; for a missing rule, the line marked and the rule."""
SPLIT_BY_HAND = """plan mine for llama
mesh {
    dp_shard = auto
    tp       = 2
}
tensor on tp {
    sequence = auto
    model.embed_tokens : rowwise
    lm_head            : colwise
    model.layers.* {
        self_attn.{q,k,v}_proj : colwise
        self_attn.o_proj : rowwise
        mlp.{gate,up}_proj : colwise
        mlp.down_proj : rowwise
    }
}
fsdp on dp_shard {
    root : unit
}
"""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_splits_without_layouts_name_the_right_splits(tmp_path, mistake):
    """PL525 marks the wrong lines alone, and the plan that its help describes is proved."""
    edits, missing = MISTAKES[mistake]
    text = SPLIT_BY_HAND
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = tmp_path / "mine.plan"
    path.write_text(text)
    (error,) = errors(path)
    assert error.code == "PL525" and error.help.endswith(": then layouts follow")
    assert [label.span.text for label in error.labels] == list(missing or edits.values())
    told = [f"add `model.layers.*.{rule}`" for rule in missing.values()]
    for module, style in (line.split(" : ") for line in (edits if not missing else ())):
        told.append(f"give `model.layers.*.{module}` the style `{style}`")
    assert all(text in error.help for text in told), error.help


def test_the_plan_of_the_right_splits_is_proved(tmp_path):
    path = tmp_path / "mine.plan"
    path.write_text(SPLIT_BY_HAND)
    assert not errors(path)


def test_splits_are_explained_by_a_draft_where_no_plan_ships(tmp_path, monkeypatch):
    path = tmp_path / "mine.plan"
    path.write_text(SPLIT_BY_HAND.replace("self_attn.o_proj : rowwise", ""))
    monkeypatch.setattr(plan_files, "plan_of_family", lambda *_names, **_own: None)
    (error,) = errors(path)
    assert "o_proj : rowwise`, as `planc init` drafts it: then layouts follow" in error.help
