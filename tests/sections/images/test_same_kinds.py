"""Data ranks of which some have no images, with ranks as threads."""

from unittest import mock

import pytest
import torch
from helpers import simulated_case

from planc.diagnostics.diagnostic import PlanError
from planc.ops.document import digest
from planc.proxy.input_search import BatchShape, rank_slice
from planc.runtime.executor import apply_lowered
from planc.runtime.standalone import towers
from planc.sections.images.ops import ShareTower
from planc.simulate.thread_ranks import run_ranks

TEXT = ("input_ids", "labels", "mm_token_type_ids")


def trained(plan, kinds, *, model="qwen3-vl-8b", compare=2, shared=True, images=(), every=()):
    """What each rank's run of a step ends with: its loss, or the finding that stopped it.

    Args:
        kinds: for each rank and step, whether its batch has images.
        shared: whether ranks run the tower together, as the plan says.
        images: what a rank with images has besides.
        every: what each rank has besides.
    """
    case = simulated_case(model, plan, (), world=2)
    lowered, builder = case.compiled.lowered, case.model.builder()
    if not shared:
        lowered = lowered.map_ops(lambda ops: (op for op in ops if not isinstance(op, ShareTower)))
    batch = builder.sample(BatchShape(rows=2))
    models = [builder.build(0) for _ in range(2)]
    told = [[], []]

    def given(number, has):
        own = rank_slice(batch, number, 2)
        if has:
            return {**own, **dict(images), **dict(every)}
        rows = {name: own[name] for name in TEXT if name in own} | dict(every)
        if rows["input_ids"] is not None:
            rows["input_ids"] = torch.full_like(rows["input_ids"], 5)
        if "mm_token_type_ids" in rows:
            rows["mm_token_type_ids"] = torch.zeros_like(rows["mm_token_type_ids"])
        return rows

    def rank(number):
        run = apply_lowered(
            models[number],
            lowered,
            digest=digest(lowered),
            device_type="cpu",
            compare=compare,
        )
        for has in kinds[number]:
            try:
                loss = run.model(**given(number, has)).loss
            except PlanError as error:
                (one,) = error.diagnostics
                told[number].append((one.code, one.message, one.labels[0].span.text))
                return
            loss.backward()
            told[number].append(loss.item())

    return run_ranks(2, rank, seconds=120), told


CASES = [
    ("qwen3-vl-8b", "qwen3_vl", "`pixel_values` and `image_grid_thw`"),
    ("gemma-3-4b", "gemma3_vision", "`pixel_values`"),
]
LINE = "loss = run.model(**given(number, has)).loss"


@pytest.mark.parametrize(("model", "plan", "names"), CASES)
def test_images_on_one_rank_alone(model, plan, names):
    """The other one computes what it computes alone; where towers are not shared, both stop."""
    kinds = [(True, True), (True, False)]
    failure, told = trained(plan, kinds, model=model)
    assert failure is None and [len(losses) for losses in told] == [2, 2]
    failure, told = trained(plan, kinds, model=model, shared=False)
    assert failure is None
    for number, own in enumerate(("does", "does not")):
        message = f"some data ranks pass {names} and others do not; rank {number} {own}"
        assert told[number][1:] == [("PL479", message, LINE)]


def test_images_on_one_rank_alone_beside_embeddings_stop_both():
    """Who passes embeddings in place of ids has put the features among them."""
    every = {"inputs_embeds": torch.zeros(1, 16, 64), "input_ids": None}
    failure, told = trained("qwen3_vl", [(True,), (False,)], every=every)
    assert failure is None and [rank[0][0] for rank in told] == ["PL479", "PL479"]
    assert all("`pixel_values`" in rank[0][1] for rank in told)


def test_the_first_image_and_the_first_sound():
    """What other ranks run a tower on: of what has a value for each image or sound the first."""
    mask, lengths = torch.ones(3, 8), torch.tensor([8, 6, 4])
    given = {
        "input_features": torch.randn(3, 8, 4),
        "input_features_mask": mask,
        "lengths": lengths,
        "scale": torch.tensor(2.0),
        "return_dict": True,
        "cache": object(),
    }
    found = towers.first_input(given, "input_features")
    assert found.keys() == {"input_features", "input_features_mask", "lengths", "return_dict"}
    assert found["input_features"].shape == (1, 8, 4) and found["lengths"].tolist() == [8]
    grids = torch.tensor([[1, 2, 2], [1, 4, 2]])
    images = {"pixel_values": torch.arange(12.0)[:, None], "image_grid_thw": grids}
    found = towers.first_input({**images, "return_dict": True}, "pixel_values")
    assert found["pixel_values"].flatten().tolist() == [0, 1, 2, 3]
    assert found["image_grid_thw"].tolist() == [[1, 2, 2]] and found["return_dict"] is True


def test_towers_are_run_in_the_order_of_the_code():
    class Holder:
        def forward(self):
            self.get_audio_features()
            self.get_image_features()

    names = ["pixel_values", "pixel_values_videos", "input_values", "input_ids"]
    found = towers.kinds_of(Holder(), names)
    assert [*found.items()] == [
        ("input_values", "get_audio_features"),
        ("pixel_values", "get_image_features"),
    ]


def test_all_or_none_train_in_every_pass():
    kinds = (True, False, False, True)
    failure, told = trained("qwen3_vl", [kinds, kinds])
    assert failure is None and [len(losses) for losses in told] == [4, 4]


def test_a_tower_that_one_rank_alone_runs():
    """Without what shares it torch meets two collectives; and without gradients of nothing."""
    failure, _ = trained("qwen3_vl", [(True,), (False,)], compare=0, shared=False)
    assert "must match the size of tensor" in str(failure.error)
    with mock.patch.object(towers, "nothing_of", lambda features: torch.zeros(())):
        failure, _ = trained("qwen3_vl", [(True,), (False,)], compare=0)
    assert failure is not None


def test_images_that_cannot_be_told_apart_stop_both():
    broken = {"image_grid_thw": torch.tensor([[1, 2, 2]] * 3)}
    failure, _ = trained("qwen3_vl", [(True,), (False,)], images=broken)
    assert isinstance(failure.error, towers.TowerError)
    assert "`pixel_values` has" in str(failure.error)


ROOT = """
plan t for qwen3_vl

mesh {
    dp_shard = auto
}

train {
    model                : frozen
    model.language_model : trainable
}

fsdp on dp_shard {
    model.language_model.layers.* : unit
    root                          : unit
}
"""


def test_a_frozen_tower_that_the_root_gathers_may_be_left_out_on_one_rank(tmp_path):
    path = tmp_path / "root.plan"
    path.write_text(ROOT)
    failure, told = trained(path, [(True, False), (False, True)])
    assert failure is None and [len(losses) for losses in told] == [2, 2]
    path.write_text(ROOT.replace("model                :", "model.language_model.embed_tokens :"))
    failure, told = trained(path, [(True,), (False,)], shared=False)
    assert failure is None and [rank[0][0] for rank in told] == ["PL479", "PL479"]
