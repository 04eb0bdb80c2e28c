"""What one rank holds when it is run on fake tensors, beside what real processes held."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from statistics import median

import gloo_peaks
import pytest
import torch
from console import call
from families import FAMILIES
from gloo_combinations import COMBINATIONS, MODELS
from helpers import slow
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values
from planc.model.sources.huggingface import merged_windows
from planc.simulate.rank_job import RankRunner, RankStep
from planc.tools.estimate.answer import Request, answer
from planc.tools.estimate.from_plan import Batch
from planc.tools.measure import count as module
from planc.tools.measure import one_rank
from planc.tools.measure.count import NotCountedError, count, shallower
from planc.tools.measure.images import grid_step

PEAKS = json.loads(gloo_peaks.PEAKS.read_text())
KERNELS = 0.003
"""What kernels hold while they run, which nobody counts."""


@pytest.mark.parametrize(
    "name",
    [
        "llama, 2 batches",
        "tied llama, pp 2, tp 2",
        "llama, cp 4",
        "llama, cp 4, ring, no checkpoints",
        "bamba, cp 2",
        slow("llama, tp 2"),
        slow("llama, pp 2, zbv, no checkpoints"),
        slow("gpt2, hsdp 2"),
    ],
)
def test_as_on_real_processes(name):
    for rank, sizes in zip(COMBINATIONS[name].counted(), PEAKS[name], strict=True):
        assert -KERNELS < rank.peak / median(sizes) - 1 <= 1e-4, name


def test_tied_weights_are_held_once(tmp_path):
    """Also where no unit has them, and nothing but the model ties them."""
    path = tmp_path / "alone.plan"
    path.write_text("plan alone for llama\n\nmesh {\n    dp = auto\n}\n")
    held = []
    for tied in (False, True):
        [rank] = count(compiled("llama", str(path), ranks=1, tie_word_embeddings=tied), STEP)
        held.append(rank.moments["optimizer step"])
    embedding = 4 * MODELS["llama"]["vocab_size"] * MODELS["llama"]["hidden_size"]
    apart, once = held
    assert apart["parameters"] - once["parameters"] == embedding
    assert apart["optimizer state"] - once["optimizer state"] == 2 * embedding + 4  # its steps


def test_equal_shares_of_experts():
    """Real ranks hold as many rows as are routed to them: 47 to 52 MB of equal ranks."""
    [rank] = COMBINATIONS["mixtral, ep 2"].counted()
    [sizes] = PEAKS["mixtral, ep 2"]
    assert min(sizes) * 0.95 < rank.peak < max(sizes) * 1.05


def compiled(model, plan, *settings, ranks=4, **fields):
    sink = Sink()
    facts = load_values({**MODELS[model], **fields}, model, sink)
    made = compile_plan(facts, plan, sink, world_size=ranks, settings=settings)
    assert made.lowered, sink.diagnostics
    return made


STAGES = ("pp=2", "microbatches=2")
STEP = RankStep(rows=2, tokens=64, micro_batches=1, dtype="float32")


@pytest.mark.parametrize(
    ("made", "layers"),
    [
        (lambda: compiled("llama", "llama", "tp=2", num_hidden_layers=9), (3, 4)),
        slow(
            lambda: compiled("llama", "llama", "pp=2", "microbatches=2", num_hidden_layers=16),
            (6, 8),
        ),
        slow(lambda: compiled("gemma2", "gemma2", num_hidden_layers=11), (7, 9)),  # two kinds
    ],
    ids=["llama", "stages", "two kinds"],
)
def test_a_few_layers_tell_of_all(made, layers):
    """Each moment and each of its parts, to the byte."""
    every = made()
    few, all_ = count(every, STEP), count(every, STEP, exact=True)
    assert [rank.layers for rank in few] == [layers] * len(few)
    assert [rank.moments for rank in few] == [rank.moments for rank in all_]


@pytest.mark.parametrize(
    ("schedule", "microbatches", "run"),
    [
        ("1f1b", 18, {8, 10}),
        slow("interleaved_1f1b", 20, {8, 10}),
        slow("zbv", 20, {8, 10}),
        slow("gpipe", 24, {8, 10, 24}),  # most is held at other microbatches
        slow("1f1b", 19, {19}),  # no even rounds
    ],
)
def test_a_few_microbatches_tell_of_all(schedule, microbatches, run, monkeypatch):
    """Each moment and each of its parts, to the byte."""
    asked, ask = [], RankRunner.ask
    monkeypatch.setattr(RankRunner, "ask", lambda *job: asked.append(job[1]) or ask(*job))
    terms = ("pp=2", f"microbatches={microbatches}", f"schedule={schedule}")
    layers = 2 if schedule == "1f1b" else 4
    every = compiled("llama", "llama", *terms, num_hidden_layers=layers)
    step = replace(STEP, rows=microbatches)
    few = count(every, step)
    assert {job.step.rows for job in asked} == run
    assert {many for rank in few for many in rank.microbatches} == run
    assert [rank.moments for rank in few] == [r.moments for r in count(every, step, exact=True)]


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
INTERNVL = {
    "model_type": "internvl",
    "architectures": ["InternVLForConditionalGeneration"],
    "image_token_id": 100,
    "downsample_ratio": 0.5,
    "image_seq_length": 4,
    "text_config": {"model_type": "qwen2", **TEXT},
    "vision_config": {
        "model_type": "internvl_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": [32, 32],
        "patch_size": [8, 8],
    },
}


def with_images(images, *settings):
    """What is held in the loss on the first place of the pipeline, by what it is."""
    facts = load_values(INTERNVL, "internvl", Sink())
    made = compile_plan(facts, "internvl", Sink(), world_size=4, settings=settings)
    return count(made, replace(STEP, images=images), places=(0,))[0].moments["loss"]


@pytest.mark.parametrize(
    "settings",
    [
        ("recompute=false",),
        slow(("recompute=false", "pp=2", "microbatches=2")),
        slow(("recompute=false", "cp=2")),
    ],
)
def test_images_of_each_row(settings):
    """Each image holds as much as the one before it."""
    tower = "activations of model.vision_tower.encoder.layer.*"
    some = [with_images(n, *settings).get(tower, 0) for n in (2, 4, 8)]
    assert some[2] - some[1] == 2 * (some[1] - some[0]) > 0


def test_divided_images():
    """Each of two ranks has half of them."""
    tower, settings = "activations of model.vision_tower.encoder.layer.*", ("recompute=false",)
    whole = with_images(2, *settings)[tower]
    for axis in ("tp=2", "cp=2"):
        assert with_images(4, *settings, axis, "images=rows")[tower] == whole


def test_images_of_any_size():
    """A grid of twice the patches holds what two images do, and more than one."""
    facts = load_values(FAMILIES["qwen3_vl"], "qwen3_vl", Sink())
    grids = compile_plan(facts, "qwen3_vl", Sink(), world_size=4, settings=["tp=2"])
    side = grid_step(facts.config)

    def held(images, *size):
        step = replace(STEP, images=images, image_size=size)
        return sum(count(grids, step)[0].moments["loss"].values())

    one, two = held(1, 4 * side, 4 * side), held(2, 4 * side, 4 * side)
    assert held(1, 4 * side, 8 * side) == pytest.approx(two, rel=1e-2)
    assert two > one > held(0)


class EachWindow(RankRunner):
    MODULE = "ranks_of_each_window"


def test_windows_of_an_image_have_the_bytes_of_two_parts():
    facts = load_values(FAMILIES["qwen2_5_vl"], "qwen2_5_vl", Sink())
    grids = compile_plan(facts, "qwen2_5_vl", Sink(), world_size=4, settings=["recompute=false"])
    side = grid_step(facts.config)
    step = replace(STEP, images=1, image_size=(6 * side, 4 * side))
    [merged] = count(grids, step)
    with EachWindow() as runner:
        [each] = count(grids, step, runner)
    assert merged.moments == each.moments
    assert merged.peak == pytest.approx(each.peak, rel=KERNELS)


def test_an_attention_of_windows_is_called_twice(monkeypatch):
    calls, attention = [], torch.nn.functional.scaled_dot_product_attention

    def count_calls(*args, **kwargs):
        calls.append(args[0].shape[2])
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", count_calls)
    config = Qwen2_5_VLVisionConfig(hidden_size=32, num_heads=4, attn_implementation="sdpa")
    layer = Qwen2_5_VLVisionAttention(config)
    ends, turns = torch.tensor([0, 4, 8, 12, 14]), torch.ones(14, 8)
    for context, lengths in ((merged_windows(), [4, 10]), (nullcontext(), [4, 4, 4, 2])):
        with context:
            output = layer(torch.ones(14, 32), ends, (turns, turns))
        assert output.shape == (14, 32) and calls == lengths
        calls.clear()


def test_images_of_unknown_sizes():
    grids = compile_plan("qwen3-vl-8b", "qwen3_vl", Sink(), world_size=4)
    for images, size, text in [
        (1, (), "does not say how large images are, as `--image-size 256x256` does"),
        (1, (100, 96), "each side of its images has a multiple of 32 pixels"),
        (1, (320, 320), "1 images, 100 tokens each, do not fit in a row of 64"),
        (0, (64, 64), "the step has none: pass --images"),
    ]:
        with pytest.raises(NotCountedError, match=text):
            count(grids, replace(STEP, images=images, image_size=size))
    facts = load_values(INTERNVL, "internvl", Sink())
    internvl = compile_plan(facts, "internvl", Sink(), world_size=4)
    with pytest.raises(NotCountedError, match="states the size of images, 32 x 32 pixels"):
        count(internvl, replace(STEP, images=1, image_size=(64, 64)))
    with pytest.raises(NotCountedError, match="no model that puts images"):
        count(compiled("llama", "llama"), replace(STEP, images=1))
    with pytest.raises(NotCountedError, match="on fake tensors alone"):
        count(compiled("llama", "llama"), replace(STEP, images=1), device="cpu")


def test_layers_that_do_not_repeat_are_all_run():
    every = compiled("llama", "llama", num_hidden_layers=4)
    assert count(every, STEP)[0].layers == (4,)


@pytest.mark.parametrize("model", ["llama", "tied llama"])
def test_what_the_last_gather_leaves_in_a_loss_in_chunks(model):
    """With many words in one unit, which the estimate has beside its gathered parameters; a tied
    head is gathered first, with the embedding, and the last one gathered is a block.
    """
    every = compiled(model, "llama", "loss_chunks=4", "recompute=false", vocab_size=32768)
    estimated, run = both(every, "loss")
    assert estimated / run == pytest.approx(1, abs=0.01)


def both(made, moment, tokens=STEP.tokens):
    """Bytes of a moment, estimated and counted."""
    [rank] = count(made, replace(STEP, tokens=tokens))
    batch = Batch(global_batch=8, sequence=tokens, micro_batches=1)
    found = answer(*made.applied, Request(batch=batch), Sink())
    [estimated] = [m for m in found.estimate.ranks[0].moments if m.name == moment]
    return estimated.size, sum(rank.moments[moment].values())


@pytest.mark.parametrize("setting", ["param_dtype=bf16", "param_dtype=fp32"])
@pytest.mark.parametrize("model", ["llama", "tied llama"])
def test_gradients_of_a_large_vocabulary(model, setting):
    """torch holds the last gradient of a unit until it is reduced, and those of tied weights wait
    while what the first block's reduce-scatter reads is there.
    """
    made = compiled(model, "llama", setting, vocab_size=32768, num_hidden_layers=9)
    estimated, run = both(made, "end of backward")
    assert estimated / run == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize("section", ["replicate on dp", "fsdp on dp"])
def test_a_unit_of_the_whole_model(tmp_path, section):
    """Which is gathered while the loss is computed; so are replicas of blocks."""
    plan = tmp_path / "own.plan"
    for units in ("root : unit", "transformer.h.* : unit\n    root : unit"):
        plan.write_text(
            f"plan own for gpt2\nmesh {{\n    dp = auto\n}}\n{section} {{\n    {units}\n}}\n"
        )
        made = compiled("gpt2", str(plan), vocab_size=8192, num_attention_heads=4)
        estimated, run = both(made, "loss", tokens=512)
        assert estimated / run == pytest.approx(1, abs=0.005), units


def test_the_last_gather_beside_a_large_unit(tmp_path):
    """Its buffer stays until the forward pass ends, when whole logits have no gradient yet: with
    few tokens that is more than what the backward pass of the loss holds.
    """
    cases = [(compiled("llama", "llama", vocab_size=65536), 64)]
    for section in ("fsdp", "replicate"):  # replicas gather nothing
        plan = tmp_path / f"{section}.plan"
        mesh = "mesh {\n    dp = auto\n}\n"
        plan.write_text(f"plan own for llama\n{mesh}{section} on dp {{\n    root : unit\n}}\n")
        cases.append((compiled("llama", str(plan), num_hidden_layers=6), 32))
    for made, tokens in cases:
        estimated, run = both(made, "loss", tokens=tokens)
        assert estimated / run == pytest.approx(1, abs=0.01)


def test_it_sees_what_a_plan_changes():
    plain, kept = (
        count(compiled("llama", "llama", *more, num_hidden_layers=8), STEP)[0]
        for more in ((), ("recompute=false",))
    )
    name = "activations of model.layers.*"
    assert kept.moments["loss"][name] > 5 * plain.moments["loss"][name]
    assert kept.moments["loss"]["parameters"] == plain.moments["loss"]["parameters"]


COMPILED = "compile {\n    $blocks : block\n}\n"
OFFLOADED = "override checkpoint {\n    $blocks : full(offload = cpu)\n}\n"


def own(folder, text):
    plan = folder / "own.plan"
    plan.write_text(f'plan own for llama\nextend "llama.plan"\n\n{text}')
    return str(plan)


@pytest.mark.parametrize(
    ("text", "device", "reason"),
    [
        (COMPILED, "", "compiled code does not run on fake tensors"),
        (COMPILED, "cpu", "compiled blocks show none"),
        (OFFLOADED, "", "offloaded"),
    ],
)
def test_what_cannot_be_run(tmp_path, text, device, reason):
    made = compiled("llama", own(tmp_path, text))
    for ask in (
        lambda: count(made, STEP, device=device),
        lambda: shallower(made, 2, Sink(), device),
    ):
        with pytest.raises(NotCountedError, match=reason):
            ask()


def test_a_rank_that_dies_is_said(monkeypatch):
    monkeypatch.setattr(module.RankRunner, "MODULE", "planc.files.version")
    with pytest.raises(NotCountedError, match="ended"):
        count(compiled("llama", "llama"), STEP)


def test_the_command(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODELS["llama"] | {"num_hidden_layers": 2}))
    words = [str(tmp_path), "llama", "--world-size", "4", "--batch", "8", "--seq", "64"]
    code, out, _ = call("measure", *words, "--format", "json")
    found = json.loads(out)
    assert code == 0 and found["layers"] == [2]
    assert found["ranks"][0]["peak"] / found["estimated"][0] == pytest.approx(1, abs=0.05)
    assert found["ranks"][0]["moments"][0]["items"][0]["place"]
    code, out, _ = call("measure", *words)
    assert "at most (" in out and "estimated: " in out
    code, _, errors = call("measure", *words, "--stage", "1")
    assert code == 2 and "ranks 0 to 0, and no 1" in " ".join(errors.split())
    code, _, errors = call("measure", words[0], own(tmp_path, COMPILED), *words[2:])
    assert code == 2 and "PL727" in errors


def llama(folder):
    """The folder of a small model."""
    (folder / "config.json").write_text(json.dumps(MODELS["llama"] | {"num_hidden_layers": 2}))
    return str(folder)


@pytest.mark.slow
def test_rows_for_calibrate(tmp_path):
    """Rows of other runs stay, settings with spaces are read as they were given, and rows without
    seconds count for the memory alone.
    """
    model, path = llama(tmp_path), tmp_path / "rows.csv"
    words = [model, "llama", "--world-size", "4", "--batch", "8", "--seq", "64", "-o", str(path)]
    head = "model,plan,world_size,set,batch,seq,seconds"
    path.write_text(f"{head}\n")
    assert "takes no row" in call("measure", *words)[2]  # it has no column for what was measured
    timed = [f"{model},llama,4,,{8 * n},64,{n},," for n in range(1, 7)]
    before = "\n".join([f"{head},micro_batches,gib", *timed])
    path.write_text(before)
    sets = ["--set", "param_dtype=fp32", "--set", "tp = 2"]
    assert call("measure", *words, *sets)[0] == 0
    last = path.read_text().removeprefix(f"{before}\n").strip()
    assert last.startswith(f"{model},llama,4,param_dtype=fp32 'tp = 2',8,64,,1,0.0")
    code, out, _ = call("calibrate", str(path), "-o", str(tmp_path / "own.toml"))
    assert code == 0
    assert re.search(r"memory error median \d+\.\d%, worst .* \(nothing is fitted\)", out)
    assert out.startswith("before: time error median")


@pytest.mark.slow
def test_the_function(tmp_path):
    folder = llama(tmp_path)
    found = planc.measure(folder, "llama", world_size=4, batch=8, seq=64, overrides=["tp=2"])
    words = [folder, "llama", "--world-size", "4", "--batch", "8", "--seq", "64", "--set"]
    said = json.loads(call("measure", *words, "tp=2", "--format", "json")[1])
    assert found.fits
    assert found.counted.fullest.peak == max(rank["peak"] for rank in said["ranks"])
    assert str(found).startswith("llama on dp_replicate 1 | dp_shard 2 | tp 2, 8 x 64 tokens")
    with pytest.raises(planc.PlanError, match=r"PL727.*compiled code"):
        planc.measure(folder, own(tmp_path, COMPILED), world_size=4, batch=8, seq=64)
    with pytest.raises(ValueError, match="batch is a positive number"):
        planc.measure(folder, "llama", world_size=4, batch=0, seq=64)


@pytest.mark.parametrize("text", [COMPILED, OFFLOADED])
def test_what_cannot_be_run_is_said_at_its_line(tmp_path, text):
    words = [llama(tmp_path), own(tmp_path, text), "--world-size", "4", "--batch", "8", "--seq", 64]
    said = call("measure", *words)[2]
    assert "error[PL727]" in said
    assert "own.plan:5:" in said


def test_a_model_that_reads_values_is_named_with_its_line():
    with FakeTensorMode(), pytest.raises(Exception) as caught:
        torch.ones(3).sum().item()
    said = one_rank.why(caught.value)
    assert re.fullmatch(
        r"`torch.ones\(3\).sum\(\).item\(\)`, test_counted.py:\d+, reads values of tensors, "
        "which fake ones do not have",
        said,
    )
