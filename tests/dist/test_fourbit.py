"""QLoRA under a plan trains as peft and bitsandbytes do in one process, on the CPU.

What is compared is the library's own `Linear4bit` in one process, with peft around it.
"""

import pytest

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

LIMIT = 1e-5
COUNT = 2 * (7 * 2 + 1)


def settings(**values):
    return [f"{name}={str(value).lower()}" for name, value in values.items()]


def right(results, limit=LIMIT):
    for result in results:
        assert max(result["logits"], result["loss"], result["gradient"]) < limit, result
        assert result["count"] == COUNT and result["unchanged"] == 14


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_four_bits_train_as_in_one_process(four, tp, checkpointing):
    overrides = settings(tp=tp, checkpointing=checkpointing, param_dtype="fp32")
    right(four.run("fourbitjobs.compare", overrides=overrides))
