"""What is to blame for a refuted plan: the lines of a finding, and what its help says to write."""

import re
from dataclasses import replace

import pytest
from helpers import mutant

import planc
from planc.proof import remedy
from planc.syntax import plan_files

PARTIAL = ("self_attn.o_proj : rowwise\n", "self_attn.o_proj : rowwise(-> partial)\n")
WHOLE = ("tp=2", "sequence_parallel=false")


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
            r"give `model.layers.\*.self_attn.o_proj` the style `rowwise`, as \S+llama.plan:48",
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
            r"add `model.layers.\*.mlp.up_proj : colwise`, as \S+llama.plan:40",
            id="a missing rule, which has no line of its own",
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
    assert ": then the small model is proved" in error.help
    assert [label.span.text for label in error.labels] == marks
    told = "a rule is missing" if help.startswith("add") else "to blame: right with `"
    assert error.labels[0].text.startswith(told)


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


def test_a_draft_where_no_plan_is_for_the_family(tmp_path, monkeypatch):
    path = mutant(tmp_path, "llama", *PARTIAL)
    monkeypatch.setattr(plan_files, "plan_of_family", lambda family: None)
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
