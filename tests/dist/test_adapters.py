"""LoRA under a plan trains as peft does in one process: logits, loss, and every adapter's gradient.

lora_B begins with random values here: where it is 0, so are the gradients of lora_A.
"""

import pytest
from pool import RankError

from planc.ir.style import Colwise, Replicate, Rowwise, Sequence

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
