"""Images that ranks divide: each runs the tower on some, and the proof sees whether gradients are
summed once.
"""

import copy
import dataclasses
from unittest import mock

import pytest
import torch
from helpers import compiled_of, sampled, simulated_case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.model.facts import is_inside
from planc.model.module_table import facts_of, parts_of_images, puts_images
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.standalone.divided_images import (
    DividedImages,
    columns_of,
    images_by_rank,
    runs_of_images,
)
from planc.runtime.standalone.images import ImagesError, some_images
from planc.runtime.standalone.shards import whole_of
from planc.runtime.standalone.tensor_styles import BareParallel, SummedGradient
from planc.sections.images.infer import complete
from planc.sections.images.ops import DivideImages
from planc.simulate.simulate import simulate
from planc.simulate.thread_ranks import run_ranks

ROWS = "images=rows"
MODELS = {
    "qwen3-vl-8b": "qwen3_vl",
    "qwen2.5-vl-7b": "qwen2_5_vl",
    "gemma-3-4b": "gemma3_vision",
}
OWN = """plan own for qwen3_vl
extend "qwen3_vl.plan"
fsdp on dp_shard_cp, replicate on dp_replicate {
    override $tower : unit(on = dp_shard * tp)
    model.visual    : unit(on = dp_shard * tp)
}
"""


def outcome_of(plan, settings, *, model="qwen3-vl-8b", changed=lambda op: [op]):
    """What the threads of four ranks compute, beside one process.

    Args:
        changed: the operations in place of each.
    """
    case = simulated_case(model, plan, (ROWS, *settings))
    lowered = case.compiled.lowered
    assert lowered.has(DivideImages)
    lowered = lowered.map_ops(lambda ops: (made for op in ops for made in changed(op)))
    return simulate(case.model.builder(), lowered)


# Right plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "axes"),
    sampled([(m, a) for m in MODELS for a in (("tp=2",), ("cp=2",), ("tp=2", "cp=2"))], 4),
)
def test_divided_images_are_proved(model, axes):
    found = outcome_of(MODELS[model], axes, model=model)
    assert found.verdict == "proved", found.discrepancies[:2]
    # each module has a verdict, those of the tower by its features and gradients
    assert all(error is not None for _, error in found.modules)


@pytest.mark.slow
def test_one_image_and_several_passes_are_proved():
    """With one image, gradients of position embeddings and of the class token share memory."""
    case = simulated_case("internvl3.5-8b", "internvl", (ROWS, "tp=2"), world=2)
    found = simulate(case.model.builder(), case.compiled.lowered)
    assert found.verdict == "proved", found.discrepancies[:2]


class Prefixed(torch.nn.Module):
    """One parameter for the first row, and another that is added to all rows."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(1, 4))
        self.added = torch.nn.Parameter(torch.randn(3, 4))

    def forward(self, rows):
        return torch.cat([self.first, rows]) + self.added


@pytest.mark.parametrize(
    "style",
    [SummedGradient(), BareParallel({"first": Replicate(), "added": Replicate()})],
    ids=["module", "parameters"],
)
def test_gradients_that_share_memory_are_accumulated_separately(style):
    torch.manual_seed(0)
    plain, passes = Prefixed(), torch.randn(2, 2, 3, 4)
    parts, found = [copy.deepcopy(plain) for _ in range(2)], {}
    for of_rank in passes:
        for factors in of_rank:
            (plain(torch.ones(2, 4)) * factors).sum().backward()

    def rank(number):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = style._apply(parts[number], mesh["tp"])
        for factors in passes[number]:
            (model(torch.ones(2, 4)) * factors).sum().backward()
        found[number] = [whole_of(p.grad, None) for p in model.parameters()]

    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure and (failure.message, failure.error)
    for gradients in found.values():
        for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.plan"
    path.write_text(OWN)
    return str(path)


def test_units_of_the_tower_over_the_same_axes(own):
    """FSDP takes the mean of the ranks' gradients, each of which has a summand."""
    found = outcome_of(own, ("tp=2",))
    assert found.verdict == "proved", found.discrepancies[:2]
    ops = compiled_of("qwen3-vl-8b", own, (ROWS, "tp=2"), world=4).lowered.ops
    (op,) = [op for op in ops if isinstance(op, DivideImages)]
    assert op.times == 2
    assert not [
        o for o in ops if isinstance(o, Parallelize) and is_inside(str(o.modules), op.tower)
    ]


# Sums that are forgotten or doubled --------------------------------------------------------------


def of_tower(op):
    return isinstance(op, Parallelize) and str(op.modules).startswith("model.visual")


def undivided(op):
    return [] if isinstance(op, DivideImages) else [op]


def unsummed(op):
    return [] if of_tower(op) else [op]


def with_(**changes):
    def changed(op):
        return [dataclasses.replace(op, **changes) if isinstance(op, DivideImages) else op]

    return changed


@pytest.mark.parametrize(
    ("axes", "changed", "ratio"),
    [
        ("tp=2", unsummed, None),  # forgotten
        ("tp=2", undivided, "2 times"),  # all ranks have all images, and gradients are summed
        ("tp=2", with_(times=2), "2 times"),
        ("tp=2", with_(parts=True), "2 times"),  # each has the whole gradient, and all are added up
        ("cp=2", with_(parts=False), None),  # the gradients of other ranks' tokens are lost
        ("cp=2", with_(times=2), "2 times"),
    ],
)
def test_a_sum_that_is_forgotten_or_doubled_is_refuted(axes, changed, ratio):
    found = outcome_of("qwen3_vl", (axes,), changed=changed)
    assert found.verdict == "refuted"
    wrong = [d for d in found.discrepancies if d.kind in ("gradient", "partial")]
    assert wrong and all(d.subject.startswith("model.visual") for d in wrong)
    assert found.logits < 1e-5 and all(d.error > 1e-2 for d in wrong)
    if ratio:
        assert any(ratio in d.detail for d in wrong)


def test_a_mean_in_place_of_a_sum_is_refuted(own):
    found = outcome_of(own, ("tp=2",), changed=with_(times=1))
    assert found.verdict == "refuted"
    # half of the right one on each rank
    assert all(d.kind == "partial" and d.error == pytest.approx(0.5) for d in found.discrepancies)


# The parts of a tower ----------------------------------------------------------------------------


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.audio = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.project, self.language_model = torch.nn.Linear(2, 2), torch.nn.Embedding(4, 2)
        self.between = torch.nn.Parameter(torch.zeros(2))

    def get_input_embeddings(self):
        return self.language_model

    def get_image_features(self, pixel_values):
        return self._projected(self.visual(pixel_values)) + self.between

    def _projected(self, found):
        return self.project(found)

    def forward(self, input_ids, pixel_values):
        found = self.get_input_embeddings()(input_ids)
        return self.audio(found + self.get_image_features(pixel_values))


class Shared(Holder):
    def forward(self, input_ids, pixel_values):
        found = self.get_input_embeddings()(input_ids)
        return self._projected(found) + self.get_image_features(pixel_values)


@pytest.mark.parametrize(("made", "shared"), [(Holder, 1), (Shared, 2)])
def test_what_computes_features_of_images(made, shared):
    """Also through methods; not what is for sound, nor the language model."""
    (holder,) = puts_images(facts_of(made()))
    assert parts_of_images(holder) == {"visual": 1, "project": shared, "between": 1}


def test_adapters_in_units_of_their_own_are_refused(tmp_path):
    """FSDP would take the mean of frozen weights' gradients, and nothing would sum theirs."""
    path, sink = tmp_path / "own.plan", Sink()
    path.write_text(OWN + "adapters {\n    units = own\n    $tower.attn.qkv : lora(rank = 2)\n}\n")
    compile_plan("qwen3-vl-8b", str(path), sink, world_size=4, settings=(ROWS, "tp=2"))
    (found,) = [d for d in sink if d.code == "PL572"]
    assert "lora_A" in found.message


def test_a_module_with_two_uses_is_refused():
    facts, sink = facts_of(Shared()), Sink()
    plan = compiled_of("qwen3-vl-8b", "qwen3_vl", (ROWS, "tp=2")).plan
    complete(dataclasses.replace(plan, tensor=()), facts, sink)
    (found,) = sink
    assert found.code == "PL572" and "`project`" in found.message.replace("root.", "")


# Documents with images ---------------------------------------------------------------------------


def test_documents_with_images_are_in_the_proof():
    """Blocks of images see each other where the row has them, and documents are apart."""
    case = simulated_case("gemma-3-4b", "gemma3_vision", ("cp=2",))
    assert case.model.builder().build(0).config.mm_tokens_per_image > 1
    found = simulate(case.model.builder(), case.compiled.lowered)
    assert found.verdict == "proved" and "two packed documents" in found.passes


# Runs of images ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "ranks", "bounds"),
    [
        ([4, 4, 4, 4], 2, [0, 2, 4]),
        ([16, 4, 4, 4, 4], 2, [0, 1, 5]),
        ([4], 4, [0, 0, 0, 1, 1]),
        ([1, 1], 4, [0, 0, 1, 1, 2]),
        ([], 2, [0, 0, 0]),
        ([0, 0], 2, [0, 2, 2]),
    ],
)
def test_runs_have_about_as_many_patches(sizes, ranks, bounds):
    assert runs_of_images(sizes, ranks) == bounds


def test_features_are_columns():
    whole, rows = torch.zeros(5, 3), (torch.zeros(2, 3), torch.zeros(3, 3))
    (one,) = columns_of("pooler_output", whole, 2)
    assert (one.layer, one.by_image, one.sizes) == (None, False, [5])
    (one,) = columns_of("pooler_output", rows, 2)
    assert (one.layer, one.by_image, one.sizes) == (None, True, [2, 3])
    two = columns_of("deepstack_features", [rows, whole], 2)
    assert [(c.layer, c.by_image, c.sizes) for c in two] == [(0, True, [2, 3]), (1, False, [5])]
    with pytest.raises(ImagesError, match="2 tensors for 3 images"):
        columns_of("pooler_output", rows, 3)


class Precomputed(torch.nn.Module):
    def get_image_features(self, pixel_values, image_grid_thw=None, **kwargs):
        return {"pooler_output": pixel_values}

    def forward(self, pixel_values, **kwargs):
        return self.get_image_features(pixel_values, **kwargs).pooler_output


def test_what_is_precomputed_of_images_cannot_be_divided():
    """transformers takes `image_cu_seqlens` and others, whose values are of all images; what is of
    text, or of videos, does not meet the images.
    """
    mesh = mock.Mock(**{"size.return_value": 2, "get_local_rank.return_value": 0})
    holder = Precomputed()
    images_by_rank(holder, mesh)
    given = {"pixel_values": torch.zeros(8, 2), "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}
    cut = mock.Mock(side_effect=lambda made, *_: made)
    with mock.patch.object(DividedImages, "_gather_features", cut):
        found = holder.get_image_features(
            **given, cu_seq_lens_q=torch.zeros(3), video_cu_seqlens=torch.zeros(3)
        )
        assert len(found["pooler_output"]) == 4
        with pytest.raises(ImagesError, match="`image_cu_seqlens` cannot be divided"):
            holder.get_image_features(**given, image_cu_seqlens=torch.tensor([0, 4, 8]))


def test_values_of_images_may_be_lists():
    """Seconds between the frames of a video: without them its positions would be others."""
    videos = {
        "pixel_values_videos": torch.zeros(12, 3),
        "video_grid_thw": torch.tensor([[1, 2, 2], [2, 2, 2]]),
        "second_per_grid_ts": [0.5, 2.0],
    }
    found = some_images(videos, "pixel_values_videos", 1, 2)
    assert found["second_per_grid_ts"] == [2.0]
    assert found["pixel_values_videos"].shape == (8, 3) and len(found["video_grid_thw"]) == 1
    with pytest.raises(ImagesError, match=r"`second_per_grid_ts` has \[3\] for 2 images"):
        some_images({**videos, "second_per_grid_ts": [1.0] * 3}, "pixel_values_videos", 0, 1)
