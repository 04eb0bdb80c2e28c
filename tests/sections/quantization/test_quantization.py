"""QLoRA under a plan trains as peft and bitsandbytes do in one process, on the CPU.

What is compared is the library's own `Linear4bit` in one process, with peft around it.
"""

import pytest

pytestmark = pytest.mark.slow

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
    overrides = settings(tp=tp, recompute=checkpointing, param_dtype="fp32")
    right(four.run("quantization_jobs.compare", overrides=overrides))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_biases(four, family, changes, sequence_parallel):
    overrides = settings(tp=2, sequence=sequence_parallel, param_dtype="fp32")
    arguments = {"family": family, "changes": {"intermediate_size": 128, **changes}}
    right(four.run("quantization_jobs.compare", overrides=overrides, **arguments))


def test_scales_that_are_quantized_too(four):
    arguments = {"double": True, "extra": ", double = true"}
    overrides = settings(tp=1, param_dtype="fp32")
    right(four.run("quantization_jobs.compare", overrides=overrides, **arguments))


def test_copies_and_shards(four):
    overrides = settings(tp=1, dp_replicate=2, param_dtype="fp32")
    right(four.run("quantization_jobs.compare", overrides=overrides))


@pytest.mark.parametrize(
    "more",
    [
        "}\nfsdp on dp_shard, replicate on dp_replicate {\n    offload(cpu, pin = false)\n",
        "    units = own\n",
    ],
)
def test_beside_other_words_of_a_plan(four, more):
    overrides = settings(tp=2, param_dtype="fp32")
    right(four.run("quantization_jobs.compare", overrides=overrides, more=more))


@pytest.mark.parametrize("tp", [1, 2])
def test_products_in_another_dtype(four, tp):
    arguments = {"compute": "bfloat16", "extra": ", compute = bf16"}
    overrides = settings(tp=tp, param_dtype="fp32")
    right(
        four.run("quantization_jobs.compare", overrides=overrides, **arguments),
        limit=1e-5 if tp == 1 else 0.02,
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_bfloat16(four, tp):
    arguments = {"storage": "bfloat16", "dtype": "bfloat16"}
    overrides = settings(tp=tp, param_dtype="bf16")
    right(four.run("quantization_jobs.compare", overrides=overrides, **arguments), limit=0.05)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_shards_are_the_bytes_of_the_whole(four, storage):
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[storage]
    overrides = settings(tp=1, param_dtype=dtype)
    assert (
        four.run("quantization_jobs.same_bytes", overrides=overrides, storage=storage) == [14] * 4
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_the_emitted_script_is_the_same(four, tp):
    overrides = settings(tp=tp, param_dtype="fp32")
    applied = four.run("quantization_jobs.compare", overrides=overrides)
    written = four.run("quantization_jobs.compare", overrides=overrides, script=True)
    assert written == applied  # bit for bit


@pytest.mark.parametrize("tp", [1, 2])
def test_other_blocks_are_seen(four, tp):
    overrides = settings(tp=tp, param_dtype="fp32")
    for result in four.run("quantization_jobs.compare", overrides=overrides, block=128):
        assert result["logits"] > 1e-3


# Memory and files --------------------------------------------------------------------------------

TP = settings(tp=2, param_dtype="fp32")
WHOLE = settings(tp=1, param_dtype="fp32")


@pytest.mark.parametrize("overrides", [WHOLE, TP])
def test_no_whole_weight_is_left(four, overrides):
    for column, scales, full in four.run("quantization_jobs.no_copies", overrides=overrides):
        assert column == full // 8 // 4  # half a byte of four, and a rank of four
        split = 2 if overrides == TP else 1
        assert 0 < scales <= full // 4 // 32 * 4 // split  # a float32 for a block


@pytest.mark.parametrize("weights", ["slices", "rank0"])
@pytest.mark.parametrize("overrides", [WHOLE, TP])
def test_a_model_on_meta(four, tmp_path, overrides, weights):
    arguments = {"folder": str(tmp_path / "base"), "overrides": overrides, "weights": weights}
    assert four.run("quantization_jobs.from_meta", **arguments) == [True] * 4


@pytest.mark.parametrize("weights", ["slices", "rank0"])
@pytest.mark.parametrize("overrides", [WHOLE, TP])
def test_the_script_fills_a_model_on_meta(four, tmp_path, overrides, weights):
    arguments = {"folder": str(tmp_path / "base"), "overrides": overrides, "weights": weights}
    assert four.run("quantization_jobs.script_from_meta", **arguments) == [([], "")] * 4


@pytest.mark.parametrize(("overrides", "others"), [(TP, WHOLE), (WHOLE, TP)])
def test_adapters_as_peft_reads_them(four, tmp_path, overrides, others):
    arguments = {"folder": str(tmp_path / "a"), "overrides": overrides, "others": others}
    for found, fresh in four.run("quantization_jobs.saved", **arguments):
        assert found < LIMIT < 1e-2 < fresh


@pytest.mark.parametrize(("overrides", "others"), [(TP, WHOLE), (WHOLE, TP)])
def test_a_checkpoint_goes_on_under_another_plan(four, tmp_path, overrides, others):
    arguments = {"folder": str(tmp_path), "overrides": overrides, "others": others}
    assert max(four.run("quantization_jobs.resumed", **arguments)) < LIMIT


def test_what_is_refused(four, tmp_path):
    codes = four.run("quantization_jobs.refused", folder=str(tmp_path), overrides=WHOLE)
    assert codes == [[["PL686"], ["PL686"], ["PL687"], ["PL687"], ["PL496"]]] * 4
