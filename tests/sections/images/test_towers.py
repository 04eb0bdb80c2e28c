"""Models of images and text, whose rows have other numbers of images, against one process."""

import pytest

pytestmark = pytest.mark.slow

LIMIT = 1e-4
FP32 = ["param_dtype=fp32", "reduce_dtype=fp32"]
PLANS = {
    "qwen3_vl": "qwen3_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "gemma3-vision": "gemma3_vision",
    "gemma4-vision": "gemma4_vision",
    "llava": "llava",
    "llava_next": "llava",
    "llava_onevision": "llava",
    "internvl": "internvl",
    "qwen3_5-vision": "qwen3_5",
    "qwen3_5_moe-vision": "qwen3_5",
}
DEEP = (("depth", 3), ("num_hidden_layers", 4))
"""Three layers of qwen3_vl's tower give features for the first three of four blocks."""


def right(four, model, plan=None, **case):
    """The four processes compute what one does; models with states in float64, since in float32
    one process itself is as far from the truth.
    """
    double = model.startswith("qwen3_5")
    limit = 1e-9 if double else LIMIT
    case |= {"model": model, "plan": plan or PLANS[model], "double": double}
    for result in four.run("tower_jobs.judge", **case):
        assert result["loss"] < limit and result["gradient"] < limit, result
        assert not result["extra"] and result["count"], result


# A data rank without images ----------------------------------------------------------------------


@pytest.mark.parametrize("script", [False, True], ids=["apply", "script"])
@pytest.mark.parametrize("model", PLANS)
def test_data_ranks_without_images(four, model, script):
    right(four, model, overrides=FP32, script=script)


# Sequence parallelism ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", PLANS)
def test_parts_of_the_sequence_between_blocks(four, model):
    right(four, model, overrides=[*FP32, "tp=2", "sequence=true"])


def test_deepstack_and_parts_of_the_sequence_in_a_script(four):
    """Features are added after two of three blocks, and between them hidden states are whole."""
    right(four, "qwen3_vl", overrides=[*FP32, "tp=2", "sequence=true"], script=True)


# Images divided over ranks -----------------------------------------------------------------------

ROWS = [*FP32, "images=rows"]


@pytest.mark.parametrize("axes", [["tp=2"], ["tp=2", "sequence=true"], ["cp=2"]], ids="-".join)
@pytest.mark.parametrize("model", PLANS)
def test_images_divided_over_ranks(four, model, axes):
    """Three images over two ranks, those of one data rank; the other one has none."""
    right(four, model, overrides=[*ROWS, *axes])


@pytest.mark.parametrize(
    ("axes", "images"),
    [
        (["tp=2"], (1, 0, 0, 0)),  # a rank has no image, and a data rank has none
        (["tp=2"], (0, 0, 0, 0)),
        (["cp=4"], (0, 1, 0, 1)),
        (["cp=4"], (0, 0, 0, 0)),
        (["tp=2", "cp=2"], (2, 1, 1, 0)),
        (["tp=2", "cp=2"], (0, 1, 0, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["qwen3_vl", "qwen2_5_vl", "gemma3-vision"])
def test_more_ranks_than_images(four, model, axes, images):
    right(four, model, overrides=[*ROWS, *axes], images=images)


@pytest.mark.parametrize("axes", [["tp=2"], ["cp=2"]], ids="-".join)
@pytest.mark.parametrize("model", ["qwen3_vl", "llava_next"])
def test_divided_images_in_a_script(four, model, axes):
    right(four, model, overrides=[*ROWS, *axes], script=True)


@pytest.mark.parametrize("model", ["qwen3_vl", "gemma3-vision"])
def test_divided_images_in_stages(four, model):
    """The ranks of the first stage divide the images of a microbatch, another one has none."""
    overrides = [*ROWS, "pp=2", "tp=2", "microbatches=2"]
    right(four, model, overrides=overrides, images=(2, 1, 0, 0))


@pytest.mark.parametrize("dropped", [False, True])
def test_dropout_in_a_divided_tower(four, dropped):
    """Ranks draw as many numbers as their images need, and alike behind the tower: three images
    are two and one.
    """
    found = four.run("tower_jobs.drawn", overrides=[*ROWS, "tp=2"], dropped=dropped)
    assert all(draws == 2 for draws, *_ in found)  # the tower, and what projects its features
    (one, other), (third, fourth) = found[:2], found[2:]
    assert (one[1:] == other[1:]) is (not dropped)
    assert third[1:] == fourth[1:]  # each of which runs the one image


# What else a plan or a script does with towers ---------------------------------------------------

TOWER_AXES = [
    ["tp=2"],
    ["tp=2", "images=rows"],
    ["cp=2", "images=rows"],
    ["tp=2", "cp=2", "images=rows"],
    ["pp=2", "microbatches=2"],
    ["pp=2", "tp=2", "microbatches=2", "images=rows"],
]
ADAPTERS = {
    "qwen3_vl": """
    $tower.attn.qkv                       : lora(rank = 3, init = random)
    $tower.mlp.linear_fc{1,2}             : lora(rank = 4, init = random)
    model.visual.merger.linear_fc2        : lora(rank = 2, init = random)
    $blocks.self_attn.{q,o}_proj          : lora(rank = 3, init = random)
""",
    "gemma3-vision": """
    $tower.self_attn.{q,k,v,out}_proj     : lora(rank = 3, init = random)
    $tower.mlp.fc2                        : lora(rank = 4, init = random)
    $blocks.self_attn.{q,o}_proj          : lora(rank = 3, init = random)
""",
}
TARGETS = {
    "qwen3_vl": (
        (r"model\.visual\.blocks\.\d\.attn\.qkv", 3),
        (r"model\.visual\.blocks\.\d\.mlp\.linear_fc[12]", 4),
        (r"model\.visual\.merger\.linear_fc2", 2),
        (r"model\.language_model\.layers\.\d\.self_attn\.[qo]_proj", 3),
    ),
    "gemma3-vision": (
        (r"model\.vision_tower\.encoder\.layers\.\d\.self_attn\.(q|k|v|out)_proj", 3),
        (r"model\.vision_tower\.encoder\.layers\.\d\.mlp\.fc2", 4),
        (r"model\.language_model\.layers\.\d\.self_attn\.[qo]_proj", 3),
    ),
}
FAMILY = {"qwen3_vl": "qwen3_vl", "qwen2_5_vl": "qwen2_5_vl", "gemma3-vision": "gemma3"}


def written(folder, model, more):
    """A plan that extends a model's own."""
    path = folder / "t.plan"
    path.write_text(f'plan t for {FAMILY[model]}\n\nextend "{PLANS[model]}.plan"\n\n{more}')
    return str(path)


def images_for(axes, passes=1):
    """Images of rows, so that a data rank, a pass or a microbatch has none."""
    if passes > 1:
        return (0, 1, 2, 0, 1, 0, 0, 1)
    return (2, 1, 0, 0) if "pp=2" in axes else (1, 2, 0, 0)


@pytest.mark.parametrize("script", [False, True], ids=["apply", "script"])
@pytest.mark.parametrize("axes", TOWER_AXES, ids="-".join)
@pytest.mark.parametrize("model", ADAPTERS)
def test_adapters_in_towers(four, tmp_path, model, axes, script):
    plan = written(tmp_path, model, f"adapters {{{ADAPTERS[model]}}}\n")
    case = {"adapters": TARGETS[model], "script": script, "images": images_for(axes)}
    right(four, model, plan, overrides=[*FP32, *axes], **case)


PROJECTORS = {
    "qwen3_vl": "model.visual.merger, model.visual.deepstack_merger_list",
    "gemma3-vision": "model.multi_modal_projector",
}


@pytest.mark.parametrize("script", [False, True], ids=["apply", "script"])
@pytest.mark.parametrize("axes", [[], *TOWER_AXES], ids="-".join)
@pytest.mark.parametrize("model", PROJECTORS)
def test_projectors_that_train_alone(four, tmp_path, model, axes, script):
    """Text alone reaches nothing that trains; of stages the last one trains its norm, too."""
    trained = PROJECTORS[model]
    if "pp=2" in axes:
        trained += ", model.language_model.norm"
    train = f"train {{\n    model, lm_head : frozen\n    {trained} : trainable\n}}\n"
    plan = written(tmp_path, model, train)
    case = {"script": script, "images": images_for(axes)}
    right(four, model, plan, overrides=[*FP32, *axes], **case)


@pytest.mark.parametrize("script", [False, True], ids=["apply", "script"])
@pytest.mark.parametrize("axes", [[], *TOWER_AXES], ids="-".join)
@pytest.mark.parametrize("model", ["qwen3_vl", "qwen2_5_vl", "gemma3-vision"])
def test_passes_of_a_step(four, model, axes, script):
    """A data rank has images in one pass, and none in the next."""
    case = {"passes": 2, "images": images_for(axes, 2), "script": script}
    right(four, model, overrides=[*FP32, *axes], **case)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("axes", [[], *TOWER_AXES], ids="-".join)
@pytest.mark.parametrize("model", ["qwen3_vl", "gemma3-vision"])
def test_checkpoints_of_the_model(four, model, axes, reentrant):
    overrides = [*FP32, *axes, "recompute=false"]
    right(four, model, overrides=overrides, reentrant=reentrant, images=images_for(axes))


@pytest.mark.parametrize("axes", [[], ["cp=2", "images=rows"]], ids="-".join)
@pytest.mark.parametrize("recompute", ["false", "true"])
def test_compiled_towers(four, tmp_path, recompute, axes):
    """With tp the embedding, which is whole, has no compiled blocks behind it: PL432."""
    plan = written(tmp_path, "qwen3_vl", "compile {\n    $tower, $blocks : block\n}\n")
    overrides = [*FP32, *axes, f"recompute={recompute}"]
    right(four, "qwen3_vl", plan, overrides=overrides)


@pytest.mark.parametrize("axes", [["tp=2"], ["cp=2"], ["tp=2", "cp=2"]], ids="-".join)
@pytest.mark.parametrize("model", ["qwen3_vl", "gemma3-vision"])
def test_divided_images_in_bf16(four, model, axes):
    """As near to fp32 as where each rank runs the tower on all images: all gradients together,
    since that of one weight is rounded by chance.
    """
    errors = {}
    for images in ("whole", "rows"):
        overrides = ["param_dtype=bf16", "reduce_dtype=fp32", *axes, f"images={images}"]
        found = four.run("tower_jobs.judge", model=model, plan=PLANS[model], overrides=overrides)
        errors[images] = [max(one[what] for one in found) for what in ("loss", "gradients")]
    for one, other in zip(errors["rows"], errors["whole"], strict=True):
        assert one < max(1.5 * other, 1e-3) and other < 0.05


# Context parallelism -----------------------------------------------------------------------------


@pytest.mark.parametrize("images", [(1, 2, 0, 0), (0, 0, 0, 0)], ids=["images", "text"])
@pytest.mark.parametrize("model", PLANS)
def test_parts_of_rows_with_images(four, model, images):
    """Of two data ranks one has no images; in text alone no rank has."""
    right(four, model, overrides=[*FP32, "cp=2"], images=images)


@pytest.mark.parametrize(
    ("more", "script"),
    [(["tp=2", "sequence=true"], False), (["tp=2", "sequence=true"], True), ([], True)],
    ids=str,
)
@pytest.mark.parametrize("model", ["qwen3_vl", "gemma3-vision", "qwen3_5-vision"])
def test_parts_of_rows_with_images_and_of_weights(four, model, more, script):
    right(four, model, overrides=[*FP32, "cp=2", *more], script=script)


@pytest.mark.parametrize("images", ["whole", "rows"])
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.parametrize("model", ["qwen3_vl", "gemma3-vision"])
def test_other_exchanges_of_parts_with_images(four, tmp_path, model, attention, images):
    path = tmp_path / "t.plan"
    base = f'extend "{PLANS[model]}.plan"\n\ncontext on cp {{\n'
    base += f"    override attention = {attention}\n"
    family = {"qwen3_vl": "qwen3_vl", "gemma3-vision": "gemma3"}[model]
    path.write_text(f"plan t for {family}\n\n{base}    balance = none\n}}\n")
    right(four, model, str(path), overrides=[*FP32, "cp=2", f"images={images}"])


def test_features_at_the_places_of_others(four):
    """Features of all images, in the order of the row, would go to a rank's own places."""
    given = {"model": "qwen3_vl", "plan": "qwen3_vl", "overrides": [*FP32, "cp=2"]}
    for result in four.run("tower_jobs.judge", **given, broken="features"):
        assert result["gradient"] > 1e-2, result


# Stages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [False, True], ids=["apply", "script"])
@pytest.mark.parametrize("model", PLANS)
def test_stages(four, model, script):
    """Of two data ranks one has a microbatch without images, the other none with images; of
    qwen3_vl, whose features are added after both blocks, the second stage adds some.
    """
    overrides = [*FP32, "pp=2", "microbatches=2"]
    right(four, model, overrides=overrides, images=(2, 0, 0, 0), script=script)


def test_stages_of_weights_and_parts_of_the_sequence(four):
    overrides = [*FP32, "pp=2", "tp=2", "microbatches=2", "sequence=true"]
    right(four, "qwen3_vl", overrides=overrides, changes=DEEP)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_several_stages_of_a_rank(four, schedule):
    """Features of the third block pass through the second stage."""
    overrides = [*FP32, "pp=2", "microbatches=4", f"schedule={schedule}"]
    images = (1, 2, 0, 0, 0, 0, 1, 1)
    right(four, "qwen3_vl", overrides=overrides, changes=DEEP, images=images)


@pytest.mark.parametrize("axes", [[], ["tp=2", "images=rows"], ["pp=2", "microbatches=2"]])
@pytest.mark.parametrize("model", ["llava_next", "llava_onevision"])
def test_images_of_other_numbers_of_tokens(four, model, axes):
    """No argument says how many tokens an image has: microbatches have its run of placeholders."""
    right(four, model, overrides=[*FP32, *axes], images=(2, 1, 0, 0), turned=True)


def test_features_that_a_later_stage_does_not_get(four):
    overrides = [*FP32, "pp=2", "microbatches=2"]
    given = {"model": "qwen3_vl", "plan": "qwen3_vl", "overrides": overrides}
    found = four.run("tower_jobs.judge", **given, broken="unsent")
    assert max(result["gradient"] for result in found) > 1e-2


# Videos, and documents in one row ----------------------------------------------------------------

AXES = [
    [],
    ["tp=2", "sequence=true"],
    ["tp=2", "images=rows"],
    ["cp=2"],
    ["cp=2", "images=rows"],
    ["pp=2", "microbatches=2"],
]


@pytest.mark.parametrize("videos", ["some", "all"])
@pytest.mark.parametrize("axes", AXES, ids="-".join)
@pytest.mark.parametrize("model", ["qwen3_vl", "qwen2_5_vl"])
def test_videos(four, model, axes, videos):
    """A video of two frames, with images or without; a data rank or a microbatch has none."""
    images = (2, 1, 0, 0) if "pp=2" not in axes else (2, 0, 0, 0)
    right(four, model, overrides=[*FP32, *axes], images=images, videos=videos)


@pytest.mark.parametrize("axes", AXES, ids="-".join)
@pytest.mark.parametrize(
    ("model", "packed"), [("qwen3_vl", "dims"), ("qwen2_5_vl", "dims"), ("gemma3-vision", "rows")]
)
def test_documents_with_images(four, model, packed, axes):
    """Two documents a row, which positions tell apart."""
    images = (2, 1, 0, 0) if "pp=2" not in axes else (2, 0, 0, 0)
    overrides = [*FP32, *axes]
    right(four, model, overrides=overrides, images=images, packed=packed, padded=False)
