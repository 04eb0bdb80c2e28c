"""`make mutants`: what it changes in a plan, and how it counts what it sees."""

import random

import make
import pytest
import subjects
import tables
import truth

from planc import compiler
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values

KINDS = {
    *("rule dropped", "rule retargeted", "style", "layout", "local", "checkpoint"),
    *("unit", "unit dropped", "reduce dtype", "divide", "ignore", "condition", "frozen"),
    *("loss", "layers", "degree", "pipeline", "context", "expert"),
}


@pytest.fixture(scope="module")
def llama():
    """The texts of a plan, and all mutants of a deep model by kind."""
    way = next(w for w in subjects.ways("llama") if w.name == "deep")
    sink = Sink()
    facts = load_values(dict(way.values), "llama", sink)
    done = compiler.compile(
        compiler.read(str(subjects.STATED / "llama.plan"), sink),
        facts,
        sink,
        world_size=4,
        settings=way.settings,
    )
    files = subjects.chain("llama")
    every = [
        *make.in_place(files),
        *make.of_modules(files, "llama.plan", done.plan),
        *make.on_layers(files, "llama.plan", done.plan),
        *make.on_degrees(files, "llama.plan", done.plan, way.conditions),
    ]
    kinds = {}
    for mutant in every:
        kinds.setdefault(mutant.kind, []).append(mutant)
    return files, kinds


def test_every_kind_of_change_is_made(llama):
    files, kinds = llama
    assert kinds.keys() == KINDS
    assert all(m.files != files for some in kinds.values() for m in some)


@pytest.mark.parametrize(
    ("kind", "what", "text"),
    [
        ("condition", "inverted", "when not (sequence) {"),
        ("reduce dtype", "reduce bf16", "reduce = bf16)"),
        ("divide", "divide by 3", "divide = 3\n    precision("),
        ("ignore", "$blocks ignored", "    ignore $blocks"),
        ("frozen", "model.norm frozen", "train {\n    model.norm : frozen\n}"),
        ("pipeline", "stages even(model.layers[1:])", "stages = even(model.layers[1:])"),
        ("context", "attention ulysses", "attention = ulysses"),
        (
            "layers",
            "output partial on layers[-1]",
            "tensor on tp {\n"
            "    override model.layers[-1].self_attn.o_proj : rowwise(-> partial)\n",
        ),
        (
            "degree",
            "output partial when config.num_hidden_layers > 3",
            "when config.num_hidden_layers > 3 {\n"
            "        override model.layers[0:4].self_attn.o_proj : rowwise(-> partial)\n",
        ),
    ],
)
def test_a_change_is_what_its_name_says(llama, kind, what, text):
    found = [m for m in llama[1][kind] if m.what.endswith(what)]
    assert any(text in written for m in found for written in m.files.values())


def test_all_kinds_take_part_in_a_sample(llama):
    every = [m for some in llama[1].values() for m in some]
    drawn = [*make.in_turn(every, random.Random(0))]
    assert {m.kind for m in drawn[: len(KINDS)]} == KINDS
    assert len(drawn) == len(every)


def rank(rough=False, **errors):
    found = {**dict.fromkeys(truth.LIMITS, 0.0), **errors}
    return {"errors": found, "rough": rough, "worst": "lm_head.weight"}


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ([rank(), rank(gradient=9e-5)], "right"),
        ([rank(), rank(gradient=2e-4)], "wrong"),
        ([rank(norm=float("nan")), rank()], "wrong"),
        ([rank(rough=True, gradient=1e-2), rank(rough=True)], "right"),
        ([rank(rough=True, gradient=1e-1), rank(rough=True)], "wrong"),
        ([rank(rough=True, logits=1e-3), rank(rough=True)], "wrong"),
        ([rank(rough=True, routes=0.03), rank(rough=True)], "right"),
        ([rank(rough=True, routes=0.06), rank(rough=True)], "wrong"),
    ],
)
def test_one_rank_that_is_off_is_enough(ranks, verdict):
    assert truth.judged(ranks)[0] == verdict


def test_a_contradiction_is_no_alarm_and_a_bad_plan_is_refuted_by_it():
    assert tables.category("right", "contradictory") == "contradictory"
    assert tables.category("wrong", "contradictory") == "refuted"


@pytest.mark.parametrize(
    ("kind", "real", "said", "bad"),
    [
        ("style", "crash", "refuted", False),
        ("style", "wrong", "unknown", False),
        ("style", "wrong", "passed", True),
        ("style", "right", "passed", False),
        ("style", "right", "refuted", True),
        ("style", "not elaborated", "refuted", False),
        ("ignore", "right", "contradictory", False),
        ("ignore", "wrong", "contradictory", False),
        ("unchanged", "right", "passed", False),
        ("unchanged", "right", "unknown", True),
        ("unchanged", "wrong", "refuted", True),
    ],
)
def test_silence_and_false_alarms_fail_the_run(capsys, kind, real, said, bad):
    found = {"family": "llama", "seconds": 60, "counts": [[kind, real, said, 1]]}
    assert tables.show([found]) == bad
    assert "1 families in 1 minutes" in capsys.readouterr().out
