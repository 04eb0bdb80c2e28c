"""Random numbers of ranks: by rank on shards, alike elsewhere, and again in recomputation."""

import math
from itertools import combinations

import modelfolder
import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import planc
from planc.sections.draws.standalone import draw_by_rank, sync_rng_state
from planc.simulate import thread_ranks
from planc.simulate.random_numbers import RankRandom, Replayed

RANKS, WIDTH, PASSES, KEPT = 4, 512, 100, 0.9
COUNT = WIDTH * PASSES


class Block(nn.Module):
    """Two layers of which the first gives shards: what is dropped after each."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Identity(), nn.Identity()

    def forward(self, x):
        shards = nn.functional.dropout(self.up(x), 1 - KEPT)
        whole = nn.functional.dropout(self.down(shards * 0 + x), 1 - KEPT)
        return shards, whole


class Model(nn.Module):
    def __init__(self, recomputed=False, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.recomputed = recomputed

    def forward(self, x):
        found = []
        for block in self.blocks:
            found += checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return found


def parallel(model, mesh):
    for block in model.blocks:
        draw_by_rank(block.up, mesh, after=True)
        draw_by_rank(block.down, mesh, after=False)
    draw_by_rank(model, mesh, inside=False, after=False)
    return model


def on_ranks(job):
    """What a job returns on each of four ranks whose own seeds differ."""
    found = {}

    def rank_of(rank):
        torch.manual_seed(rank)
        with RankRandom():
            mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
            sync_rng_state(mesh, "tp")
            found[rank] = job(mesh)

    before = torch.get_rng_state()
    failure = thread_ranks.run_ranks(RANKS, rank_of, seconds=120)
    torch.set_rng_state(before)
    assert failure is None, failure
    return [found[rank] for rank in range(RANKS)]


@pytest.fixture(scope="module")
def draws():
    """[ranks, place, numbers] of many passes: shards and whole, of two blocks."""

    def job(mesh):
        model = parallel(Model(), mesh)
        passes = [model(torch.ones(WIDTH)) for _ in range(PASSES)]
        return torch.stack([torch.cat(place) for place in zip(*passes, strict=True)])

    return torch.stack(on_ranks(job))


def correlation(one, two):
    return float(torch.corrcoef(torch.stack([one, two]))[0, 1])


BOUND = 5 / math.sqrt(COUNT)
"""Five standard deviations of the correlation of independent numbers."""


def test_what_is_whole_is_drawn_alike(draws):
    assert all(
        torch.equal(draws[0, place], draws[rank, place]) for rank in (1, 2, 3) for place in (1, 3)
    )


def test_shards_of_different_ranks_are_not_correlated(draws):
    for place in (0, 2):
        for one, two in combinations(range(RANKS), 2):
            assert abs(correlation(draws[one, place], draws[two, place])) < BOUND


def test_layers_and_passes_are_not_correlated(draws):
    for rank in range(RANKS):
        for one, two in combinations(range(4), 2):
            assert abs(correlation(draws[rank, one], draws[rank, two])) < BOUND
        for place in draws[rank]:
            assert abs(correlation(place[:-WIDTH], place[WIDTH:])) < BOUND


def test_mean_and_variance_are_those_of_dropout(draws):
    """Of a kept share of p, scaled by 1 / p: mean 1 and variance (1 - p) / p."""
    variance = (1 - KEPT) / KEPT
    for numbers in draws.flatten(0, 1):
        assert abs(float(numbers.mean()) - 1) < 5 * math.sqrt(variance / COUNT)
        share = float((numbers > 0).double().mean())  # the variance follows from it
        assert abs(share - KEPT) < 5 * math.sqrt(KEPT * (1 - KEPT) / COUNT)
        assert float(numbers.var()) == pytest.approx(share * (1 - share) / KEPT**2, rel=1e-3)


def test_recomputation_draws_again_what_the_forward_drew():
    def job(mesh):
        state, gradients = torch.get_rng_state(), []
        for recomputed in (False, True):
            torch.set_rng_state(state)
            x = torch.ones(WIDTH, requires_grad=True)
            outputs = parallel(Model(recomputed), mesh)(x)
            weights = torch.arange(1.0, len(outputs) + 1)
            sum(w * o.sum() for w, o in zip(weights, outputs, strict=True)).backward()
            gradients.append(x.grad)
        return torch.equal(*gradients), gradients[0]

    found = on_ranks(job)
    assert all(same for same, _ in found)
    assert float(found[0][1].std()) > 0


def test_a_restored_state_draws_the_same_again():
    def job(mesh):
        model, x = parallel(Model(), mesh), torch.ones(WIDTH)
        model(x)
        state = torch.get_rng_state()
        first = model(x)
        model(x)
        torch.set_rng_state(state)
        return all(map(torch.equal, first, model(x)))

    assert all(on_ranks(job))


def test_a_model_that_raises_on_shards_leaves_the_common_state():
    class Raising(Block):
        def forward(self, x):
            self.up(x)
            raise ValueError("on shards")

    def job(mesh):
        model = Model()
        model.blocks[1] = Raising()
        parallel(model, mesh)
        with pytest.raises(ValueError, match="on shards"):
            model(torch.ones(WIDTH))
        return torch.rand(8).tolist()

    first, *others = on_ranks(job)
    assert all(other == first for other in others)


def test_uneven_shards_leave_the_common_state():
    """A rank with more heads draws more numbers, and what follows is still drawn alike."""

    def job(mesh):
        model = parallel(Model(), mesh)
        block = model.blocks[0]
        block.up(torch.ones(1))
        nn.functional.dropout(torch.ones(10 * (1 + distributed.get_rank())))
        block.down(torch.ones(1))
        return torch.rand(8).tolist()

    first, *others = on_ranks(job)
    assert all(other == first for other in others)


# What is compared ----------------------------------------------------------------------------


def replayed(shape, *drawn):
    with Replayed([[torch.tensor(part)] for part in drawn], lambda: ("m", "line")) as mode:
        made = torch.rand(shape)
    return made.tolist(), [one.problem for one in mode.different_draws]


def test_one_process_gets_what_the_ranks_drew():
    assert replayed([2], [1.0, 2.0], [1.0, 2.0]) == ([1.0, 2.0], [])
    assert replayed([4], [1.0, 2.0], [3.0, 4.0]) == ([1.0, 2.0, 3.0, 4.0], [])
    assert replayed([1, 3], [[1.0, 2.0]], [[3.0]]) == ([[1.0, 2.0, 3.0]], [])


def test_what_ranks_draw_otherwise_than_one_process():
    assert replayed([2], [1.0, 2.0], [1.0, 3.0])[1] == [
        "the ranks have different random numbers for the same activations"
    ]
    many = [float(i) for i in range(128)]
    assert replayed([256], many, many)[1] == [
        "the ranks have the same random numbers for different shards"
    ]
    assert replayed([5], [1.0], [2.0])[1] == [
        "random numbers have the shapes [1], [1] on the ranks, and [5] in one process"
    ]


@pytest.mark.parametrize("call", ["lower", "check", "init"])
def test_what_runs_on_a_cold_cache_leaves_a_scripts_random_numbers(call, tmp_path, monkeypatch):
    """Else ranks draw differently after `apply`, where one finds what another has to run."""
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPU's"))
    config = modelfolder.written(tmp_path / "model")
    torch.random.default_generator.manual_seed(7)
    before = torch.get_rng_state()
    arguments = {"overrides": ["tp=2"], "world_size": 2}
    if call == "init":
        planc.init(config)
    else:
        getattr(planc, call)(config, "llama", **arguments)
    assert torch.equal(torch.get_rng_state(), before)
