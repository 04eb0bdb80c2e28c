"""A fixed sample of `make coverage`: init, check, four processes, for sixteen families.

Plain `pytest` runs a part of it.
"""

import pytest
import theirs
from family_rows import LIMIT, row
from helpers import slow
from pool import Pool

SAMPLE = ["whisper"]
MORE = [
    *("arcee", "bert", "deepseek_v3", "gemma3", "gpt_oss"),
    *("jamba", "nemotron_h", "phimoe", "qwen3_next"),
]


def some(first, more):
    """The first are always run, the others by `make processes`."""
    return [*first, *(pytest.param(name, marks=pytest.mark.slow) for name in more)]


@pytest.mark.parametrize("family", some(SAMPLE, MORE))
def test_a_family_is_planned_and_proved(family, four, tmp_path):
    found = row(family, four, tmp_path, plans={})
    assert (found["verdict"], found["reason"], found["flow"]) == ("proved", "", "proved")
    assert max(found["errors"].values()) > 0 and found["errors"]["gradient"] < LIMIT
    assert found["share"] > 0.5


@pytest.mark.parametrize(
    "family", some([], ["ctrl", "cpmant", "internlm3", "musicgen", "reformer", "zamba2"])
)
def test_what_once_had_no_plan_has_one(family, four, tmp_path):
    """Reversible layers; linears known by shape or number; another's class; codes of sound."""
    found = row(family, four, tmp_path, plans={})
    # reformer seeds its dropout by the clock, on each rank by its own: PL511 where it has any
    flow = "refuted" if family == "reformer" else "proved"
    assert (found["verdict"], found["reason"], found["flow"]) == ("proved", "", flow)
    # cross attention of a decoder alone, which nothing calls: no run could prove a split of it
    uncalled = {"musicgen": {"q_proj", "k_proj", "v_proj", "out_proj"}}.get(family, set())
    assert {name.partition(" ")[0] for name, _ in found["kept"]} >= uncalled
    text = (tmp_path / f"{family}.plan").read_text()
    assert text.count("encoder_attn") == text.count("run does not call it") == len(uncalled)
    assert found["share"] + sum(share for name, share in found["kept"] if uncalled) > 0.85


@pytest.mark.slow
def test_a_shipped_plan_is_run_with_what_it_splits(four, tmp_path):
    found = row("llama", four, tmp_path, plans={"llama": "llama"})
    assert (found["verdict"], found["flow"], found["flowsp"]) == ("proved", "proved", "proved")
    assert found["share"] > 0.99


@pytest.mark.slow
def test_experts_are_counted_by_themselves(four, tmp_path):
    found = row("mixtral", four, tmp_path, plans={})
    assert found["experts"] == {"share": 1.0, "styles": ["experts"]} and not found["kept"]
    found = row("dbrx", four, tmp_path, plans={})
    assert found["experts"]["share"] == 0.0 and found["kept"][0][0] == "mlp (DbrxExpertGLU)"


@pytest.fixture(scope="module")
def two():
    pytest.importorskip("accelerate")  # transformers wants it to spread a model that it loads
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("family", "verdict", "off"),
    [
        ("llama", "right", set()),
        slow("gpt2", "none", set()),
        ("apertus", "wrong", {"alpha_n", "alpha_p"}),
        ("doge", "crash", set()),
    ],
)
def test_transformers_own_is_measured(family, verdict, off, two):
    """What is wrong without a word: each rank keeps its part of the gradient of `alpha_n`."""
    found = theirs.row(family, two)
    assert found["verdict"] == verdict, found["reason"]
    assert {name.rpartition(".")[2] for name in found.get("off", ())} == off
    if verdict in ("right", "wrong"):
        assert found["logits"] < LIMIT and found["split"] > 0.9
