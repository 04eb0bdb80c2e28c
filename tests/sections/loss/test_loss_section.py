"""Chunked and vocabulary-parallel losses on four processes, beside the single process."""

import pytest
from test_plans import right, settings

pytestmark = pytest.mark.slow

CASES = [
    ("llama", "llama"),
    ("llama-tied", "llama"),
    ("granite", "llama"),
    ("gemma2", "gemma2"),
    ("cohere2", "cohere2"),
    ("falcon_h1", "falcon_h1"),
    ("mixtral", "mixtral"),
    ("gpt2", "gpt2"),
    ("phi3", "phi3"),
    ("opt", "opt"),
    ("falcon", "falcon"),
]


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(("model", "plan"), CASES[:3])
def test_degrees(four, model, plan, tp):
    overrides = settings(tp=tp, loss_chunks=3, param_dtype="fp32")
    arguments = dict(model=model, plan=plan, changes={"num_key_value_heads": 4})
    right(four.run("numerics.compare", overrides=overrides, **arguments))


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_families(four, model, plan):
    overrides = settings(tp=2, loss_chunks=3, param_dtype="fp32")
    right(four.run("numerics.compare", model=model, plan=plan, overrides=overrides))


@pytest.mark.parametrize("vocabulary", [127, 129])
def test_a_vocabulary_that_does_not_divide(four, vocabulary):
    overrides = settings(tp=4, loss_chunks=5, param_dtype="fp32")
    changes = {"vocab_size": vocabulary, "num_key_value_heads": 4}
    right(
        four.run(
            "numerics.compare", model="llama", plan="llama", overrides=overrides, changes=changes
        )
    )


def test_the_script_has_the_same_bits(four):
    arguments = dict(model="gemma2", plan="gemma2")
    arguments["overrides"] = settings(tp=2, loss_chunks=3, param_dtype="fp32")
    mine = four.run("numerics.compare", **arguments)
    script = four.run("numerics.compare", script=True, **arguments)
    right(script)
    assert [r["bits"] for r in mine] == [r["bits"] for r in script]
