"""LoRA under a plan trains as peft does in one process: logits, loss, and every adapter's gradient.

lora_B begins with random values here: where it is 0, so are the gradients of lora_A.
"""

import pytest
from pool import RankError

from planc.ir.style import Colwise, Partial, Replicate, Rowwise, Shard

pytest.importorskip("peft")

LIMIT = 1e-5


def settings(**values):
    return [f"{name}={str(value).lower()}" for name, value in values.items()]


def right(results, count):
    for result in results:
        assert max(result["logits"], result["loss"], result["gradient"]) < LIMIT, result
        assert result["count"] == count


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_adapters_train_as_in_one_process(four, sequence_parallel, checkpointing):
    overrides = settings(
        tp=2,
        sequence_parallel=sequence_parallel,
        checkpointing=checkpointing,
        param_dtype="fp32",
    )
    right(four.run("adapting.compare", overrides=overrides), count=2 * (7 * 2 + 1))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_emitted_script_is_the_same(four, sequence_parallel):
    overrides = settings(tp=2, sequence_parallel=sequence_parallel, param_dtype="fp32")
    applied = four.run("adapting.compare", overrides=overrides)
    written = four.run("adapting.compare", overrides=overrides, script=True)
    assert written == applied  # bit for bit


@pytest.mark.parametrize(
    ("end", "style", "sequence_parallel"),
    [
        ("q_proj.lora_A.default", None, True),
        ("q_proj.lora_B.default", None, False),
        ("o_proj.lora_A.default", Rowwise(output=Partial()), False),
        ("o_proj.lora_B.default", Colwise(), True),
        ("lm_head.lora_A.default", None, True),
        ("lm_head.lora_B.default", Colwise(output=Shard(-1)), True),
        ("down_proj.lora_B.default", None, True),
    ],
)
def test_a_wrong_style_of_an_adapter_is_seen(four, end, style, sequence_parallel):
    overrides = settings(tp=2, sequence_parallel=sequence_parallel, param_dtype="fp32")
    try:
        results = four.run("adapting.compare", overrides=overrides, restyle=(end, style))
    except RankError:
        return
    assert max(max(r["logits"], r["gradient"]) for r in results) > 1e-4
