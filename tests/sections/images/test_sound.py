"""Models of sound, images and text whose data ranks have other kinds of inputs, against one
process: their towers are asked for in the order of the model's code, which differs by model.
"""

import pytest
from helpers import slow

pytestmark = pytest.mark.slow

PLAN = """plan sound for {family}

mesh {{
    dp_replicate = {copies}
    dp_shard     = auto
}}

fsdp on dp_shard, replicate on dp_replicate {{
    {units}
    root : unit
}}
"""
UNITS = {
    "voxtral": ["model.audio_tower.layers.*", "model.language_model.layers.*"],
    "gemma4": [
        "model.audio_tower.layers.*",
        "model.vision_tower.encoder.layers.*",
        "model.language_model.layers.*",
    ],
    "omni": [
        "model.audio_tower.layers.*",
        "model.visual.blocks.*",
        "model.language_model.layers.*",
    ],
}
FAMILIES = {"voxtral": "voxtral", "gemma4": "gemma4", "omni": "qwen2_5_omni_thinker"}
BOTH = (("image", "audio"), ("audio",), ("image",), ())
"""The kinds of inputs of each rank."""
CASES = {
    "voxtral": (("audio",), (), ("audio",), ()),
    "gemma4": BOTH,
    "omni": BOTH,
}


def plan_of(folder, model, copies=1):
    units = "\n    ".join(f"{name} : unit" for name in UNITS[model])
    path = folder / "sound.plan"
    path.write_text(PLAN.format(family=FAMILIES[model], units=units, copies=copies))
    return str(path)


def right(four, limit=1e-4, **case):
    for result in four.run("sound_jobs.judge", **case):
        assert not result["lacking"]
        worst = max(result["loss"], result["evaluated"], result["gradient"])
        assert worst < limit, result
    return result


@pytest.mark.parametrize(
    ("model", "copies"),
    [("omni", 1), *(slow(m, n) for m in CASES for n in (1, 2) if (m, n) != ("omni", 1))],
)
def test_data_ranks_with_other_kinds_of_inputs(four, tmp_path, model, copies):
    plan = plan_of(tmp_path, model, copies)
    right(four, model=model, plan=plan, has=CASES[model])


@pytest.mark.parametrize(
    "has",
    [
        (("audio",), ("image",), ("audio",), ("image",)),
        (("image", "audio"), ("image",), ("image",), ("image", "audio")),
        (("image", "audio"), ("audio",), ("audio",), ("audio",)),
        ((), (), (), ("image", "audio")),
        ((), (), (), ()),
        (("image", "audio"),) * 4,
    ],
    ids=lambda has: "-".join("".join(k[0] for k in kinds) or "0" for kinds in has),
)
@pytest.mark.parametrize("model", [slow("gemma4"), slow("omni")])
def test_any_kinds_on_any_rank(four, tmp_path, model, has):
    right(four, model=model, plan=plan_of(tmp_path, model), has=has)


@pytest.mark.slow
def test_the_order_is_that_of_the_code(four, tmp_path):
    """Gemma 4 asks for images first, and the thinker of Qwen2.5-Omni for sound."""
    orders = []
    for model in ("gemma4", "omni"):
        plan = plan_of(tmp_path, model)
        found = right(four, model=model, plan=plan, has=BOTH)
        orders.append([name for name in found["kinds"] if name != "pixel_values_videos"])
    assert orders == [["pixel_values", "input_features"], ["input_features", "pixel_values"]]


def test_sound_that_the_code_does_not_use_stops_all(four, tmp_path):
    """Gemma 4 leaves out sound without its mask."""
    case = {"model": "gemma4", "plan": plan_of(tmp_path, "gemma4"), "broken": "unmasked"}
    with pytest.raises(AssertionError, match="a rank passes `input_features`, of which"):
        right(four, has=BOTH, **case)


@pytest.mark.slow
def test_another_order_is_none(four, tmp_path):
    """A rank without sound that runs its tower behind that of images meets the others in another
    gather; where it does not, it gives another model's gradients.
    """
    plan = plan_of(tmp_path, "omni")
    with pytest.raises(AssertionError):
        right(four, model="omni", plan=plan, has=BOTH, broken="order")
