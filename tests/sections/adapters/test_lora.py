"""LoRA under a plan trains as peft does in one process: logits, loss, and every adapter's gradient.

lora_B begins with random values here: where it is 0, so are the gradients of lora_A.
"""

import pytest
from adapter_jobs import DORA
from pool import RankError

from planc.ops.styles import Colwise, Partial, Rowwise, Shard

pytestmark = pytest.mark.slow

pytest.importorskip("peft")

LIMIT = 1e-5


def settings(**values):
    return [f"{name}={str(value).lower()}" for name, value in values.items()]


TP = settings(tp=2, sequence=True, param_dtype="fp32")
WHOLE = settings(tp=1, param_dtype="fp32")
STAGES = settings(pp=2, microbatches=2, param_dtype="fp32")


def right(results, count):
    for result in results:
        assert max(result["logits"], result["loss"], result["gradient"]) < LIMIT, result
        assert result["count"] == count


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_adapters_train_as_in_one_process(four, sequence_parallel, checkpointing):
    overrides = settings(
        tp=2,
        sequence=sequence_parallel,
        recompute=checkpointing,
        param_dtype="fp32",
    )
    right(four.run("adapter_jobs.compare", overrides=overrides), count=2 * (7 * 2 + 1))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("own units", 30),
        ("some layers", 24),
        ("qwen2", 30),
        ("tied head", 30),
        ("packed", 18),
    ],
)
def test_other_adapters(four, case, count, sequence_parallel):
    overrides = settings(tp=2, sequence=sequence_parallel, param_dtype="fp32")
    right(four.run("adapter_jobs.case", name=case, overrides=overrides), count=count)


@pytest.mark.parametrize(
    ("case", "count", "overrides"),
    [
        ("conv1d", 16, settings(param_dtype="fp32")),
        ("embedding", 2, settings(tp=2, sequence=False, param_dtype="fp32")),
        ("own units", 30, settings(tp=1, dp_replicate=2, param_dtype="fp32")),
    ],
)
def test_adapters_elsewhere(four, case, count, overrides):
    right(four.run("adapter_jobs.case", name=case, overrides=overrides), count=count)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_emitted_script_is_the_same(four, sequence_parallel):
    overrides = settings(tp=2, sequence=sequence_parallel, param_dtype="fp32")
    applied = four.run("adapter_jobs.compare", overrides=overrides)
    written = four.run("adapter_jobs.compare", overrides=overrides, script=True)
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
    overrides = settings(tp=2, sequence=sequence_parallel, param_dtype="fp32")
    try:
        results = four.run("adapter_jobs.compare", overrides=overrides, restyle=(end, style))
    except RankError:
        return
    assert max(max(r["logits"], r["gradient"]) for r in results) > 1e-4


# DoRA --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("dora", 45),
        ("dora rslora", 45),
        ("dora biases", 45),
        ("dora packed", 27),
        ("dora conv1d", 24),
        ("dora dropout", 45),
        ("dora dropout biases", 24),
    ],
)
def test_dora_trains_as_in_one_process(four, case, count, sequence_parallel):
    overrides = settings(tp=2, sequence=sequence_parallel, param_dtype="fp32")
    results = four.run("adapter_jobs.case", name=case, overrides=overrides)
    right(results, count=count)
    assert all(result["unlike"] == [] for result in results)


@pytest.mark.parametrize(
    ("case", "count", "overrides"),
    [
        ("dora", 45, settings(tp=1, param_dtype="fp32")),
        ("dora compiled", 45, settings(tp=2, param_dtype="fp32")),
        ("dora dropout", 45, settings(tp=2, recompute=True, param_dtype="fp32")),
    ],
)
def test_dora_elsewhere(four, case, count, overrides):
    right(four.run("adapter_jobs.case", name=case, overrides=overrides), count=count)


@pytest.mark.parametrize("case", ["dora", "dora conv1d"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_dora_after_steps_of_adamw(four, case, sequence_parallel):
    overrides = settings(tp=2, sequence=sequence_parallel, param_dtype="fp32")
    assert max(four.run("adapter_jobs.trained", overrides=overrides, named=case)) < LIMIT


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_script_of_dora_is_the_same(four, sequence_parallel):
    overrides = settings(tp=2, sequence=sequence_parallel, param_dtype="fp32")
    applied = four.run("adapter_jobs.case", name="dora", overrides=overrides)
    written = four.run("adapter_jobs.case", name="dora", overrides=overrides, script=True)
    assert written == applied  # bit for bit


@pytest.mark.parametrize("body", [DORA, DORA.replace("init = random, ", "")])
def test_magnitudes_begin_as_in_one_process(four, body):
    arguments = {"overrides": TP, "body": body, "count": 45}
    assert four.run("adapter_jobs.begins", **arguments) == [True] * 4


@pytest.mark.parametrize(("overrides", "others"), [(TP, WHOLE), (STAGES, TP)])
@pytest.mark.parametrize("case", ["dora", "dora packed"])
def test_dora_as_peft_reads_it(four, tmp_path, case, overrides, others):
    folder = str(tmp_path / "adapters")
    meshes = {"overrides": overrides, "others": others}
    for found in four.run("adapter_jobs.saved", folder=folder, named=case, **meshes):
        assert found["logits"] < LIMIT
        assert '"use_dora": true' in found["config"]


def test_dora_on_some_layers_alone_has_no_file(four, tmp_path):
    arguments = {"folder": str(tmp_path / "a"), "overrides": WHOLE, "named": "dora on some"}
    assert four.run("adapter_jobs.unsaved", **arguments) == [["PL189"]] * 4


def test_an_export_with_dora_merged(four, tmp_path):
    four.run("adapter_jobs.merged", folder=str(tmp_path), overrides=TP, body=DORA)


@pytest.mark.parametrize("weights", ["slices", "rank0"])
def test_dora_of_a_model_on_meta(four, tmp_path, weights):
    arguments = {"overrides": TP, "weights": weights, "body": DORA}
    one = four.run("adapter_jobs.from_meta", folder=str(tmp_path / "one"), **arguments)
    assert one == [True] * 4
    two = four.run("adapter_jobs.script_from_meta", folder=str(tmp_path / "two"), **arguments)
    assert two == [([], "")] * 4


def test_magnitudes_follow_base_weights_until_a_file_gives_them(four, tmp_path):
    arguments = {"folder": str(tmp_path), "overrides": TP, "body": DORA}
    assert four.run("adapter_jobs.other_base", **arguments) == [(True, True)] * 4


def test_a_checkpoint_with_dora_goes_on_under_another_plan(four, tmp_path):
    meshes = {"overrides": TP, "others": WHOLE, "body": DORA}
    assert four.run("adapter_jobs.resumed", folder=str(tmp_path / "run"), **meshes) == [45] * 4
    four.run("adapter_jobs.without_base", folder=str(tmp_path / "other"), **meshes)


# Files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [TP, WHOLE, STAGES])
def test_adapters_begin_as_in_one_process(four, overrides):
    assert four.run("adapter_jobs.begins", overrides=overrides) == [True] * 4


@pytest.mark.parametrize(
    ("overrides", "others"), [(TP, WHOLE), (WHOLE, TP), (STAGES, TP), (WHOLE, STAGES)]
)
def test_adapters_as_peft_reads_them(four, tmp_path, overrides, others):
    folder = str(tmp_path / "adapters")
    for found in four.run("adapter_jobs.saved", folder=folder, overrides=overrides, others=others):
        assert found["logits"] < LIMIT
        assert found["files"] == ["adapter_config.json", "adapter_model.safetensors"]
        assert '"base_model_name_or_path"' in found["config"]


@pytest.mark.parametrize(("overrides", "others"), [(TP, WHOLE), (WHOLE, TP)])
def test_what_trains_beside_adapters_is_saved_with_them(four, tmp_path, overrides, others):
    folder = str(tmp_path / "adapters")
    arguments = {"folder": folder, "overrides": overrides, "others": others, "named": "beside"}
    for found in four.run("adapter_jobs.saved", **arguments):
        assert found["logits"] < LIMIT
        assert (
            '"modules_to_save": [\n    "model.embed_tokens",\n    "model.norm"' in found["config"]
        )


def test_a_layer_that_trains_beside_its_own_adapter_has_no_file(four, tmp_path):
    codes = four.run("adapter_jobs.both", folder=str(tmp_path / "a"), overrides=WHOLE)
    assert codes == [["PL688"]] * 4


@pytest.mark.parametrize("tp", [1, 2])
def test_dropout_is_drawn_again_in_recomputing(four, tp):
    """Under one seed, gradients with and without checkpointing are the same, bit for bit."""
    found = four.run("adapter_jobs.dropped", overrides=settings(tp=tp, param_dtype="fp32"))
    for changed, alike, evaluated in found:
        assert alike and changed > 1e-3 and evaluated < LIMIT


def test_adapters_of_packed_weights_as_peft_reads_them(four, tmp_path):
    arguments = {"folder": str(tmp_path / "a"), "overrides": TP, "others": WHOLE, "named": "packed"}
    for found in four.run("adapter_jobs.saved", **arguments):
        assert found["logits"] < LIMIT


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_adapters_in_another_dtype_than_their_layers(four, sequence_parallel):
    overrides = settings(tp=2, sequence=sequence_parallel, param_dtype="bf16")
    for error in four.run("adapter_jobs.two_dtypes", overrides=overrides):
        assert error < 0.05  # of bfloat16, whose sums have another order


@pytest.mark.parametrize("overrides", [TP, STAGES])
def test_an_export_with_adapters_merged(four, tmp_path, overrides):
    four.run("adapter_jobs.merged", folder=str(tmp_path), overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "weights"), [(TP, "slices"), (TP, "rank0"), (STAGES, "slices")]
)
def test_a_model_on_meta(four, tmp_path, weights, overrides):
    arguments = {"folder": str(tmp_path / "base"), "overrides": overrides, "weights": weights}
    assert four.run("adapter_jobs.from_meta", **arguments) == [True] * 4


@pytest.mark.parametrize("weights", ["slices", "rank0"])
@pytest.mark.parametrize("overrides", [TP, WHOLE])
def test_the_script_fills_a_model_on_meta(four, tmp_path, weights, overrides):
    arguments = {"folder": str(tmp_path / "base"), "overrides": overrides, "weights": weights}
    assert four.run("adapter_jobs.script_from_meta", **arguments) == [([], "")] * 4
    arguments |= {"folder": str(tmp_path / "other"), "broken": {"intermediate_size": 64}}
    for _, error in four.run("adapter_jobs.script_from_meta", **arguments):
        assert "nothing was loaded" in error and "gate_proj.weight is [64, 64]" in error


def test_a_checkpoint_goes_on_under_another_plan(four, tmp_path):
    arguments = {"folder": str(tmp_path / "run"), "overrides": TP, "others": WHOLE}
    assert four.run("adapter_jobs.resumed", **arguments) == [2 * (7 * 2 + 1)] * 4


@pytest.mark.parametrize(("overrides", "others"), [(TP, WHOLE), (WHOLE, TP), (STAGES, TP)])
def test_a_checkpoint_without_the_base_goes_on_from_its_folder(four, tmp_path, overrides, others):
    arguments = {"folder": str(tmp_path), "overrides": overrides, "others": others}
    for (code, first), (other, second) in four.run("adapter_jobs.without_base", **arguments):
        assert (code, other) == ("PL467", "PL467")
        assert "leaves out the frozen weights, and the model has no values for" in first
        assert "was trained on another base model: other values, or another dtype, in" in second
        assert second.endswith(" in model.layers.1.mlp.up_proj.weight")


def test_what_a_script_froze_is_saved(four, tmp_path):
    assert four.run("adapter_jobs.a_script_froze", folder=str(tmp_path / "run")) == [True] * 4


def test_adapters_that_do_not_fit_are_refused(four, tmp_path):
    codes = four.run("adapter_jobs.refused", folder=str(tmp_path / "a"), overrides=TP)
    assert codes == [[["PL496"], ["PL496"], ["PL496"], ["PL189"]]] * 4
