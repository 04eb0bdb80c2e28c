"""What a run says of itself on four gloo processes equals a count by hand in one process."""

import pytest
from metrics_jobs import LENGTH, PASSES, ROWS, STEPS, biases_by_hand, by_hand

pytestmark = pytest.mark.slow

MESHES = [
    ("llama", "llama", []),
    ("llama", "llama", ["tp=2"]),
    ("llama", "llama", ["cp=2"]),
    ("llama", "llama", ["pp=2", "tp=2", "microbatches=2"]),
    ("mixtral", "mixtral", []),
    ("mixtral", "mixtral", ["tp=2"]),
    ("mixtral", "mixtral", ["tp=2", "sequence=false"]),
    ("mixtral", "mixtral", ["ep=2"]),
    ("mixtral", "mixtral", ["ep=4", "tp=2"]),
    ("mixtral", "mixtral", ["ep=2", "pp=2", "microbatches=2"]),
    ("mixtral", "mixtral", ["ep=2", "cp=2"]),
]


@pytest.fixture(scope="module")
def alone():
    return {model: by_hand(model) for model in ("llama", "mixtral")}


@pytest.mark.parametrize(("model", "plan", "mesh"), MESHES)
def test_tokens_and_loads_are_those_of_one_process(four, alone, model, plan, mesh):
    [found, *_] = four.run("metrics_jobs.counted", model=model, plan=plan, overrides=mesh)
    tokens, loads = alone[model]
    numbers = found["numbers"]
    assert all(type(value) is float for value in numbers.values())
    assert found["again"] == {}
    assert numbers["tokens_seen"] == tokens == STEPS * PASSES * (ROWS * LENGTH - 4 * 3)
    seconds = STEPS * numbers["seconds_per_step"]
    assert numbers["tokens_per_second"] * seconds == pytest.approx(tokens)
    assert numbers["tokens_per_second_per_device"] * 4 == numbers["tokens_per_second"]
    assert numbers["samples_per_second"] * seconds == pytest.approx(STEPS * PASSES * ROWS)
    assert "mfu" not in numbers  # no profile has the peak of this CPU
    assert found["loads"] == loads
    for name, each in loads.items():
        worst = max(each) * len(each) / sum(each)
        assert numbers[f"experts/imbalance/{name}"] == pytest.approx(worst)
    if model == "mixtral":
        assert len(loads) == 2
        assert sum(map(sum, loads.values())) == 2 * 2 * STEPS * PASSES * ROWS * LENGTH


def test_flops_are_those_of_the_model_under_every_mesh(four):
    found = [
        four.run("metrics_jobs.counted", model="llama", plan="llama", overrides=mesh)[0]["numbers"]
        for mesh in ([], ["tp=2"], ["cp=2"], ["pp=2", "tp=2", "microbatches=2"])
    ]
    made = [n["tflops_per_device"] * n["seconds_per_step"] for n in found]
    assert made == [pytest.approx(made[0], rel=1e-6)] * 4


def test_all_ranks_count_where_one_asks(four, alone):
    arguments = {"model": "mixtral", "plan": "mixtral", "overrides": ["ep=2"], "asked": 0}
    [found, *_] = four.run("metrics_jobs.counted", **arguments)
    assert found["loads"] == alone["mixtral"][1]


def test_nothing_is_counted_unless_asked(four):
    for hooks, meter, said in four.run(
        "metrics_jobs.without", model="mixtral", plan="mixtral", overrides=["ep=2"]
    ):
        assert hooks == 0
        assert meter is None
        assert "metrics=True" in said


@pytest.mark.parametrize(
    ("model", "plan", "mesh", "others"),
    [
        ("glm4_moe", "qwen3_moe", [], ["tp=2"]),
        ("glm4_moe", "qwen3_moe", ["tp=2"], None),
        ("glm4_moe", "qwen3_moe", ["ep=2", "cp=2"], ["pp=2", "microbatches=2"]),
        ("glm4_moe", "qwen3_moe", ["pp=2", "ep=2", "microbatches=2"], ["ep=4"]),
        ("glm4_moe", "qwen3_moe", ["ep=4", "tp=2"], None),
        ("ernie4_5_moe", "mixtral", ["tp=2"], ["ep=2"]),  # a parameter, which FSDP shards
    ],
)
def test_biases_of_routers_are_moved_as_in_one_process(four, tmp_path, model, plan, mesh, others):
    right, later = biases_by_hand(model), biases_by_hand(model, 2 * STEPS)
    assert right != later
    assert any(any(values) for values in right.values())
    arguments = {"model": model, "plan": plan, "overrides": mesh, "others": others}
    for states in four.run("metrics_jobs.balanced", folder=str(tmp_path / "run"), **arguments):
        assert len(states) == (3 if others else 1)
        for found, wanted in zip(states, (right, right, later), strict=False):
            assert found.keys() == wanted.keys()
            for name, values in wanted.items():
                assert found[name] == pytest.approx(values, abs=1e-6), name
