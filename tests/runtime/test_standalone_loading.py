"""The load section on four processes: the plan decides how weights arrive, `run.load` obeys."""

import pytest

pytestmark = pytest.mark.slow

TEXT = """plan l for FAMILY
mesh {
    dp_shard = auto
}
load {
    SETTINGS
}
fsdp on dp_shard {
    model.layers.* : unit
    root           : unit
}
"""


@pytest.fixture
def plan(tmp_path):
    def write(settings, family="llama", name="l.plan"):
        path = tmp_path / name
        path.write_text(TEXT.replace("SETTINGS", settings).replace("FAMILY", family))
        return str(path)

    return write


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize(
    ("weights", "way"), [("slices", ["read_slices"]), ("rank0", ["read_rank0"])]
)
def test_run_load_and_the_script_obey(four, plan, tmp_path, weights, way, script):
    path = plan(f"init = meta\n    weights = {weights}")
    folder = str(tmp_path / "w")
    results = four.run(
        "standalone_loading_jobs.loaded", model="llama", plan=path, folder=folder, script=script
    )
    assert results == [([], [] if script else way, ["torch.float32"])] * 4


@pytest.mark.parametrize("script", [False, True])
def test_parameters_are_kept_in_the_dtype_of_the_plan(four, plan, tmp_path, script):
    path = plan("weights = slices\n    dtype = bf16")
    folder = str(tmp_path / "w")
    for different, _, dtypes in four.run(
        "standalone_loading_jobs.loaded", model="llama", plan=path, folder=folder, script=script
    ):
        assert (different, dtypes) == ([], ["torch.bfloat16"])


ISLANDS = """plan i for ernie4_5_moe
mesh {
    dp_shard = auto
}
load {
    init = meta
    weights = slices
    dtype = bf16
}
fsdp on dp_shard {
    dtype(fp32)    : unit
    model.layers.* : unit
    root           : unit
}
"""


@pytest.mark.parametrize("script", [False, True])
def test_what_a_model_keeps_in_fp32_stays_there(four, tmp_path, script):
    path = tmp_path / "i.plan"
    path.write_text(ISLANDS)
    folder = str(tmp_path / "w")
    for kept, other, loss in four.run(
        "standalone_loading_jobs.islands", plan=str(path), folder=folder, script=script
    ):
        assert "model.layers.1.mlp.gate.weight" in kept
        assert other == []
        assert loss < 2e-2


@pytest.mark.parametrize("script", [False, True])
def test_tied_parameters_stay_tied(four, plan, tmp_path, script):
    path = plan("init = meta\n    weights = slices")
    folder = str(tmp_path / "w")
    results = four.run(
        "standalone_loading_jobs.loaded",
        model="llama-tied",
        plan=path,
        folder=folder,
        script=script,
    )
    assert [r[0] for r in results] == [[]] * 4


@pytest.mark.parametrize("script", [False, True])
def test_a_distributed_checkpoint(four, plan, tmp_path, script):
    plan("dtype = fp32", name="l.old.plan")
    path = plan("init = meta\n    weights = checkpoint")
    results = four.run(
        "standalone_loading_jobs.resumed", plan=path, folder=str(tmp_path / "saved"), script=script
    )
    assert results == [[]] * 4


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("weights", ["slices", "rank0"])
def test_experts_that_are_stored_one_by_one(four, plan, tmp_path, model, weights):
    path = plan(f"weights = {weights}", family=model)
    results = four.run(
        "standalone_loading_jobs.loaded", model=model, plan=path, folder=str(tmp_path / "w")
    )
    assert [r[0] for r in results] == [[]] * 4


@pytest.mark.parametrize("weights", ["slices", "rank0"])
def test_the_peak_of_a_rank_with_experts(four, plan, tmp_path, weights):
    """An expert's slices come out of the mapped file: no tensor of many experts is put together."""
    results = four.run(
        "standalone_loading_jobs.peaks",
        model="qwen3_moe",
        plan=plan("dtype = fp32", family="qwen3_moe"),
        folder=str(tmp_path / "w"),
        weights=weights,
        changes={"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8},
    )
    for result in results:
        room = 2**21 + (weights == "rank0") * result["largest"]  # checksums of 1 MiB at a time
        assert result["shard"] <= result["peak"] <= result["shard"] + room + 2**16, result
        assert result["peak"] < result["whole"]


REFUSED = {
    "memory": ("init = meta", "PL474", "embed_tokens.weight is already allocated"),
    "rank0": ("weights = slices", "PL475", "this call has weights = rank0, the plan's load"),
    "folder": ("weights = checkpoint", "PL497", "the plan has weights = checkpoint"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_the_plan_does_not_allow(four, plan, tmp_path, how):
    settings, code, part = REFUSED[how]
    for found in four.run(
        "standalone_loading_jobs.refused", plan=plan(settings), folder=str(tmp_path / "w"), how=how
    ):
        ((got, message),) = found
        assert got == code and part in message
    assert (
        four.run(
            "standalone_loading_jobs.refused",
            plan=plan("weights = rank0"),
            folder=str(tmp_path / "v"),
            how="rank0",
        )
        == [[]] * 4
    )


# What the emitted Python does of it ---------------------------------------------------------------


@pytest.fixture
def extended(tmp_path):
    def write(family, weights):
        path = tmp_path / "e.plan"
        load = f"load {{\n    init = meta\n    weights = {weights}\n}}\n"
        path.write_text(f'plan e for {family}\n\nextend "{family}.plan"\n\n{load}\n')
        return str(path)

    return write


@pytest.mark.parametrize("weights", ["slices", "rank0", "checkpoint"])
@pytest.mark.parametrize("model", ["gpt2", "phi3", "mixtral", "llama-tied"])
def test_the_script_puts_weights_that_are_held_rank_by_rank_in_their_place(
    four, extended, tmp_path, model, weights
):
    path = extended(model.partition("-")[0], weights)
    folder = str(tmp_path / "w")
    for different, wrong in four.run(
        "standalone_loading_jobs.emitted", model=model, plan=path, folder=folder, way=weights
    ):
        assert different == []
        assert wrong < 1e-4


@pytest.mark.parametrize("weights", ["slices", "rank0"])
def test_the_script_lists_all_that_does_not_fit(four, plan, tmp_path, weights):
    path = plan(f"init = meta\n    weights = {weights}")
    arguments = {"model": "llama", "plan": path, "folder": str(tmp_path / "w"), "weights": weights}
    for told in four.run("standalone_loading_jobs.refusing", **arguments):
        folder = arguments["folder"]
        assert told == (
            f"nothing was loaded: {folder} lacks model.embed_tokens.weight, lm_head.weight; "
            f"{folder} has names that the model lacks: nobody.weight; {folder} has other shapes: "
            "model.norm.weight is [63], the model's [64]; a checkpoint of another form, such as "
            "one with one tensor for each expert, is for planc's Run.load"
        )


def test_the_script_names_and_refuses_experts_that_are_stored_one_by_one(four, plan, tmp_path):
    path = plan("init = meta\n    weights = slices", family="mixtral")
    for told in four.run(
        "standalone_loading_jobs.one_by_one", model="mixtral", plan=path, folder=str(tmp_path / "w")
    ):
        assert "mlp.experts.gate_up_proj" in told
        assert "mlp.experts.*.w1.weight (" in told or "experts.*" in told
        assert "one with one tensor for each expert, is for planc's Run.load" in told
