"""Random pairs of training plans and engines, published with threads as ranks."""

import random

import pytest
import transfer_jobs
from safetensors.torch import load_file
from test_transfer import Engine, assert_equal, elements, free_address, received, written
from tiny_engines import LLAMA, MIXTURE

from planc.simulate.random_numbers import RankRandom
from planc.simulate.thread_ranks import run_ranks

pytestmark = pytest.mark.slow
DENSE_MESHES = [["tp=2"], ["tp=4"], [], ["cp=2"], ["tp=2", "dp_replicate=2"]]
MESHES = {"dense": DENSE_MESHES, "mixture": [["ep=2"], ["tp=2", "ep=2"], ["ep=4"], ["tp=2"]]}
ENGINES = {
    "dense": [{"tp": 2}, {"tp": 1, "dp": 2}, {"tp": 4}, {"tp": 2, "dp": 2}],
    "mixture": [{"tp": 2, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2}, {"tp": 1, "dp": 3, "ep": 3}],
}


@pytest.mark.parametrize("seed", range(6))
def test_random_pairs(tmp_path, seed):
    """The bits are slices of the exported files, and no byte is sent twice."""
    choose = random.Random(seed)
    kind = choose.choice(["dense", "mixture"])
    sets, sizes = choose.choice(MESHES[kind]), {**choose.choice(ENGINES[kind]), "kv": 4}
    config = MIXTURE if kind == "mixture" else LLAMA
    plan, address = written(tmp_path, config, sizes), free_address()
    ranks, counts = sizes["tp"] * sizes.get("dp", 1), {}
    engine = Engine(address, ranks, received(1))

    def rank(number):
        with RankRandom():  # all ranks build the same model
            counts[number] = transfer_jobs.publish(
                config, sets, plan, str(tmp_path), address, bucket=1 << 16, times=1
            )

    failure = run_ranks(4, rank, seconds=200)
    assert failure is None, failure and (sets, sizes, failure.message, failure.error)
    engine.join()
    assert not engine.errors, engine.errors
    files, least = load_file(tmp_path / "0/model.safetensors"), 0
    for number, [tensors] in engine.results.items():
        assert_equal(tensors, files, number, sizes)
        at = number % sizes["tp"]
        least += 2 * sum(elements(*one, at) for one in tensors.items())
    sent, _, peaks = zip(*counts.values(), strict=True)
    assert sum(sent) <= 1.05 * least and max(peaks) <= 2 << 16
