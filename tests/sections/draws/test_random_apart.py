"""Random numbers of stages and of parts of a sequence: each its own, and alike on tensor ranks."""

from itertools import combinations

import pytest
import torch
from helpers import lowered
from test_random_numbers import BOUND, PASSES, WIDTH, Model, correlation, parallel
from torch.distributed.device_mesh import init_device_mesh

import planc
from planc.sections.draws.ops import DrawApart
from planc.sections.draws.standalone import draw_apart, sync_rng_state
from planc.simulate import thread_ranks
from planc.simulate.random_numbers import RankRandom, Recorded

SIZES = {"pp": 2, "cp": 2, "tp": 2}


def spread(model, mesh):
    """As `apply` does it: the tensor ranks first, then the places of the other axes."""
    parallel(model, mesh["tp"])
    draw_apart(model, mesh, ("pp", "cp"))
    return model


def on_ranks(job):
    """What a job returns at each place of the mesh; every rank has set the same seed."""
    found = {}

    def rank_of(_rank):
        torch.manual_seed(7)
        with RankRandom():
            mesh = init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))
            sync_rng_state(mesh, "tp")
            found[tuple(mesh.get_coordinate())] = job(mesh)

    before = torch.get_rng_state()
    failure = thread_ranks.run_ranks(8, rank_of, seconds=300)
    torch.set_rng_state(before)
    assert failure is None, failure
    return found


@pytest.fixture(scope="module")
def draws():
    """By place (pp, cp, tp): [what, numbers] of many passes, shards and whole, of one block."""

    def job(mesh):
        model = spread(Model(blocks=1), mesh)
        passes = [model(torch.ones(WIDTH)) for _ in range(PASSES)]
        return torch.stack([torch.cat(place) for place in zip(*passes, strict=True)])

    return on_ranks(job)


def test_stages_and_parts_are_not_correlated(draws):
    """Pairs of places that differ in stage or part, for what tensor ranks split and what not."""
    for one, two in combinations(draws, 2):
        if one[:2] != two[:2]:
            for what in (0, 1):
                assert abs(correlation(draws[one][what], draws[two][what])) < BOUND


def test_tensor_ranks_of_one_place_draw_whole_activations_alike(draws):
    for stage, part, _ in draws:
        first, second = (draws[stage, part, rank] for rank in (0, 1))
        assert torch.equal(first[1], second[1])
        assert abs(correlation(first[0], second[0])) < BOUND


def test_microbatches_are_not_correlated(draws):
    """Each pass is one microbatch of a stage."""
    for numbers in draws.values():
        for what in (0, 1):
            assert abs(correlation(numbers[what][:-WIDTH], numbers[what][WIDTH:])) < BOUND


def test_a_seed_before_each_step_keeps_places_apart():
    """A script that seeds each step by data rank gives all ranks of a sample one state."""

    def job(mesh):
        model, x, found = spread(Model(blocks=1), mesh), torch.ones(WIDTH), []
        for step in range(40):
            torch.manual_seed(step % 20)
            found.append(torch.cat(model(x)))
        return torch.stack(found)

    found = on_ranks(job)
    for numbers in found.values():
        assert torch.equal(numbers[:20], numbers[20:])
        assert not torch.equal(numbers[0], numbers[1])
    bound = BOUND * (PASSES / 40) ** 0.5
    for one, two in combinations(found, 2):
        if one[:2] != two[:2]:
            assert abs(correlation(found[one][:20].flatten(), found[two][:20].flatten())) < bound


def test_recomputation_draws_again_what_the_forward_drew():
    def job(mesh):
        gradients = []
        for recomputed in (False, True):
            torch.manual_seed(3)
            x = torch.ones(WIDTH, requires_grad=True)
            outputs = spread(Model(recomputed), mesh)(x)
            weights = torch.arange(1.0, len(outputs) + 1)
            sum(w * o.sum() for w, o in zip(weights, outputs, strict=True)).backward()
            gradients.append(x.grad)
        return torch.equal(*gradients), float(gradients[0].std())

    assert all(same and std > 0 for same, std in on_ranks(job).values())


# Plans -------------------------------------------------------------------------------------------

PLAN = """plan t for gpt2
mesh {
    pp = 2
    cp = CP
    tp = 1
    dp_shard = auto
}
pipeline on pp {
    schedule     = SCHEDULE
    microbatches = 2
    stages       = even(transformer.h.*, each = 1)
}
checkpoint {
    transformer.h.* : full
}
fsdp on dp_shard {
    root : unit
}
"""


def test_the_operation_follows_from_the_mesh():
    """None without dropout, and none without such axes."""
    plan = PLAN.replace("CP", "1").replace("SCHEDULE", "1f1b")
    kinds = [o for o in lowered(plan, model="gpt2", world=4).ops if isinstance(o, DrawApart)]
    assert [o.axes for o in kinds] == [("pp",)]
    for model, name in (("llama-3.2-1b", "llama"), ("gpt2", "gpt2")):
        ops = planc.lower(model, name, world_size=4, overrides=["tp=2"]).ops
        assert not [o for o in ops if isinstance(o, DrawApart)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_pipeline_draws_apart(schedule, tmp_path):
    """What each stage drops for each microbatch of gpt2, where all ranks have set one seed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64)
    config._attn_implementation = "eager"
    models = [GPT2LMHeadModel(config) for _ in range(2)]
    for model in models:
        model.train()
    text = PLAN.replace("CP", "1").replace("SCHEDULE", schedule)
    path = tmp_path / "t.plan"
    path.write_text(text)
    plan = planc.lower(models[0], str(path), world_size=2)
    masks, length = {}, 32

    def rank(number):
        torch.manual_seed(5)
        with RankRandom():
            run = planc.apply(models[number], plan, device_type="cpu", compare=0)
            tokens = torch.arange(4 * length).view(4, length) % 128
            torch.manual_seed(5)
            with Recorded() as seen:
                run.forward_backward([{"input_ids": tokens, "labels": tokens}])
        masks[number] = [m.float().flatten() for m in seen.drawn]

    failure = thread_ranks.run_ranks(2, rank, 120)
    assert failure is None, failure.error or failure.message
    drawn = [list({m.numpy().tobytes(): m for m in of_rank}.values()) for of_rank in masks.values()]
    # after the embeddings, in attention and twice behind it, of two microbatches; the checkpoint
    # of a block draws the last three again, for zero bubble more than once
    assert min(len(of_rank) for of_rank in masks.values()) >= 14
    assert [len(of_rank) for of_rank in drawn] == [8, 8]
    whole = [m for of_rank in drawn for m in of_rank if len(m) == 2 * length * 64]
    assert len(whole) == 12
    for one, two in combinations(whole, 2):
        assert abs(correlation(one, two)) < 5 / len(one) ** 0.5
