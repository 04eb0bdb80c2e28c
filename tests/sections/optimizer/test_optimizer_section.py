"""The optimizer of a plan on four processes: updates equal the single process."""

import pytest

pytestmark = pytest.mark.slow

FP32 = ["param_dtype=fp32", "recompute=false"]
FP64 = ["param_dtype=fp64", "reduce_dtype=fp64", "recompute=false"]
# With 1e-8, a gradient that is zero up to rounding moves a weight as much as a real one.
RULES = {
    "llama": """
    root                                  : adamw(eps = 1e-6)
    model.layers.*.*layernorm             : adamw(weight_decay = 0)
    model.layers.*.self_attn.{q,k,v}_proj : muon(per = head)
    model.layers.*.self_attn.o_proj       : muon
    model.layers.*.mlp.*_proj             : muon(adjust_lr = match_rms_adamw)
""",
    "phi3": """
    root                            : adamw(eps = 1e-6)
    model.layers.*.self_attn.o_proj : muon
    model.layers.*.mlp.*proj        : muon
""",
    "qwen3_moe": """
    root                            : adamw(eps = 1e-6)
    model.layers.*.self_attn.*_proj : muon
    model.layers.* has mlp.experts {
        mlp.experts                 : muon
    }
""",
    "gpt_oss": """
    root                            : adamw(eps = 1e-6)
    model.layers.*.self_attn.*_proj : muon
    model.layers.*.mlp.experts      : muon
""",
}
EIGHT = """
    root                            : adamw(eps = 1e-6, state = int8, block = 8)
    model.layers.*.self_attn.o_proj : muon(state = int8, block = 4)
    model.layers.*.mlp.*proj        : sgd(momentum = 0.9, state = int8, block = 8)
"""
FACTORED = "root : adafactor\n model.layers.*.*layernorm : adamw(eps = 1e-6)"


@pytest.fixture
def plan(tmp_path):
    def write(family, rules="", name=""):
        path = tmp_path / f"{family}{name}.plan"
        head = f'plan t for {family}\nextend "{family}.plan"\n'
        path.write_text(f"{head}optimizer {{{rules or RULES[family]}}}\n")
        return str(path)

    return write


def _named(value):
    return value if isinstance(value, str) else "-".join(value)


CASES = [
    ("llama", "llama", ["tp=2"]),
    ("llama", "llama", ["tp=1"]),
    ("llama", "llama", ["dp_replicate=2"]),
    ("llama-tied", "llama", ["tp=2"]),
    ("llama", "llama", ["pp=2", "tp=2", "microbatches=2"]),
    ("phi3", "phi3", ["tp=2"]),
    ("qwen3_moe", "qwen3_moe", ["ep=2"]),
    ("qwen3_moe", "qwen3_moe", ["ep=2", "tp=2", "etp=2"]),
]


@pytest.mark.parametrize(("model", "family", "sets"), CASES, ids=_named)
def test_three_steps_are_those_of_one_process(four, plan, model, family, sets):
    for result in four.run(
        "optimizer_jobs.train", model=model, plan=plan(family), overrides=[*FP32, *sets]
    ):
        assert result["muon"][0] < 1e-4, result["muon"]
        assert result["others"][0] < 1e-3, result["others"]


@pytest.mark.parametrize("sets", [["tp=2"], ["dp_replicate=2"]], ids="-".join)
def test_float64_leaves_nothing_but_rounding(four, plan, sets):
    """Some modules compute in float32 by themselves, so the gradients have its rounding."""
    for result in four.run(
        "optimizer_jobs.train",
        model="llama",
        plan=plan("llama"),
        overrides=[*FP64, *sets],
        double=True,
    ):
        assert result["muon"][0] < 1e-6, result["muon"]
        assert result["others"][0] < 1e-6, result["others"]


@pytest.mark.parametrize(
    ("model", "family", "sets"),
    [
        *CASES,
        ("llama", "llama", ["pp=2", "microbatches=2"]),
        ("phi3", "phi3", ["tp=1"]),
        ("phi3", "phi3", ["dp_replicate=2"]),
        ("phi3", "phi3", ["pp=2", "tp=2", "microbatches=2"]),
        ("qwen3_moe", "qwen3_moe", ["tp=2"]),
        ("qwen3_moe", "qwen3_moe", ["ep=4"]),
        ("gpt_oss", "gpt_oss", ["tp=2"]),
        ("gpt_oss", "gpt_oss", ["ep=2", "tp=2", "etp=2"]),
    ],
    ids=_named,
)
def test_steps_of_the_same_gradients_are_exact(four, plan, model, family, sets):
    """Whatever the mesh, also of fused and divided weights, of which some ranks hold nothing."""
    for (error, name), muon in four.run(
        "optimizer_jobs.exact", model=model, plan=plan(family), overrides=[*FP64, *sets]
    ):
        assert error < 1e-12, name
        assert muon > 1


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_emitted_script_steps_alike(four, plan, family):
    for one, other in four.run(
        "optimizer_jobs.script", model=family, plan=plan(family), overrides=[*FP32, "tp=2"]
    ):
        assert one == other


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("llama", ["tp=2"], ["tp=1"]),
        ("phi3", ["tp=2"], ["tp=1"]),
        ("phi3", ["tp=2"], ["tp=2"]),
        ("qwen3_moe", ["ep=2"], ["tp=2"]),
    ],
    ids=_named,
)
def test_a_run_goes_on_on_another_mesh(four, plan, tmp_path, family, old, new):
    for result in four.run(
        "optimizer_jobs.resume",
        model=family,
        plan=plan(family),
        old=[*FP32, *old],
        new=[*FP32, *new],
        folder=str(tmp_path / "run"),
    ):
        assert result["equal"]
        assert any(name.endswith("momentum_buffer") for name in result["states"])
        # another mesh rounds otherwise, and the iteration enlarges that
        near = pytest.approx(result["right"], rel=1e-4)
        assert result["losses"] == (result["right"] if old == new else near)


MESHES = pytest.mark.parametrize(
    ("mesh", "dims"),
    [
        ((4,), [0]),
        ((2, 2), [0, 1]),
        ((2, 2), [1, 0]),
        ((2, 2), [None, 1]),
        ((2, 2), [2, 1]),
    ],
    ids=str,
)


@pytest.mark.parametrize(
    ("model", "rules", "sets"),
    [
        ("llama", RULES["llama"], ["tp=2"]),
        ("llama", "root : adamw(state = int8, block = 8, offload = states)", ["dp_replicate=2"]),
        ("phi3", EIGHT, ["tp=2"]),
    ],
    ids=lambda value: "" if isinstance(value, str) and ":" in value else _named(value),
)
def test_the_copy_of_a_save_in_the_background_is_estimated(
    four, plan, tmp_path, model, rules, sets
):
    for found, estimated in four.run(
        "optimizer_jobs.copied",
        model=model,
        plan=plan(model, rules),
        overrides=[*FP32, *sets],
        folder=str(tmp_path / "run"),
    ):
        assert found == pytest.approx(estimated, rel=0.01)


@pytest.mark.parametrize("sets", [["tp=2"], ["dp_replicate=2"]], ids=_named)
def test_a_run_goes_on_with_another_section(four, plan, tmp_path, sets):
    """What the same algorithm steps goes on to the bit; what another one steps begins anew, and is
    named. The plan decides numbers and factors, and the schedule goes on.
    """
    old = """
    root                            : adamw(eps = 1e-6)
    model.layers.*.mlp.*_proj       : sgd(momentum = 0.9)
    model.layers.*.self_attn.*_proj : muon
"""
    new = """
    root                            : adamw(eps = 1e-6)
    model.layers.*.*layernorm       : adamw(eps = 1e-6, beta2 = 0.9, weight_decay = 0, lr = 2)
    model.layers.*.mlp.*_proj       : muon
    model.layers.*.self_attn.{q,k,v}_proj : adamw(eps = 1e-6)
    model.layers.*.self_attn.o_proj : muon
"""
    plans = [plan("llama", text, name) for text, name in ((old, "a"), (new, "b"))]
    every = four.run(
        "optimizer_jobs.changed",
        model="llama",
        plans=plans,
        overrides=[*FP32, *sets],
        folder=str(tmp_path / "run"),
    )
    [(said,), *others] = [said for _, _, said in every]
    assert others == [[]] * 3
    assert "model.layers.*.mlp.up_proj.weight (2 of them)" in said
    assert not any(name in said for name in ("o_proj", "norm", "embed"))
    for same, groups, _ in every:
        for name, found in same.items():
            if "layernorm" not in name:
                other = "mlp" in name or name.rpartition("self_attn.")[2][0] in "qkv"
                assert found == ((False, True) if other else (True, False)), name
        rate = 0.01 * 0.5**3
        assert sorted(groups, key=str) == [
            ("adamw", pytest.approx(rate), 0.1, (0.9, 0.999), None),
            ("adamw", pytest.approx(2 * rate), 0.0, (0.9, 0.9), None),
            ("muon", pytest.approx(rate), 0.1, None, 0.95),
        ]


@MESHES
def test_muon_on_shards_is_that_of_one_process(four, mesh, dims):
    for error in four.run("optimizer_jobs.few_rows", mesh=mesh, dims=dims):
        assert error < 1e-12


@MESHES
def test_adafactor_on_shards_is_torchs_in_one_process(four, mesh, dims):
    for error in four.run("optimizer_jobs.factored", mesh=mesh, dims=dims):
        assert error < 1e-12


@pytest.mark.parametrize(
    ("family", "sets", "double"),
    [("llama", ["tp=2"], True), ("phi3", ["tp=2"], True), ("qwen3_moe", ["ep=2"], False)],
)
def test_adafactor_of_a_plan(four, plan, family, sets, double):
    """torch has no products of experts in float64 on CPUs."""
    for result in four.run(
        "optimizer_jobs.train",
        model=family,
        plan=plan(family, FACTORED),
        overrides=[*(FP64 if double else FP32), *sets],
        double=double,
    ):
        assert result["others"][0] < (1e-6 if double else 1e-3), result["others"]


@pytest.mark.parametrize(
    ("family", "old", "new"), [("phi3", ["tp=2"], ["tp=1"]), ("qwen3_moe", ["ep=2"], ["tp=2"])]
)
def test_adafactor_goes_on_on_another_mesh(four, plan, tmp_path, family, old, new):
    for result in four.run(
        "optimizer_jobs.resume",
        model=family,
        plan=plan(family, FACTORED),
        old=[*FP32, *old],
        new=[*FP32, *new],
        folder=str(tmp_path / "run"),
    ):
        assert result["equal"]
        assert any(name.endswith("row_var") for name in result["states"])
        assert result["losses"] == pytest.approx(result["right"], rel=1e-4)


def test_a_script_steps_adafactor_alike(four, plan):
    for one, other in four.run(
        "optimizer_jobs.script",
        model="phi3",
        plan=plan("phi3", FACTORED),
        overrides=[*FP32, "tp=2"],
    ):
        assert one == other


def test_states_keep_their_dtype_when_they_are_loaded(four, plan, tmp_path):
    """torch loads states in the dtype of their parameters."""
    for result in four.run(
        "optimizer_jobs.resume",
        model="llama",
        plan=plan("llama", "root : adamw(state = bf16)"),
        old=[*FP32, "tp=2"],
        new=[*FP32, "tp=2"],
        folder=str(tmp_path / "run"),
    ):
        assert result["losses"] == result["right"]
        assert result["dtypes"] == ["torch.bfloat16", "torch.float32"]  # and the step


MIXED = """
    root                            : adamw(eps = 1e-6{0})
    model.layers.*.self_attn.o_proj : muon({1})
    model.layers.*.mlp.*proj        : sgd(momentum = 0.9{0})
    model.norm                      : adafactor({1})
    model.embed_tokens              : adafactor({1})
"""


@pytest.mark.parametrize(
    ("family", "sets"),
    [
        ("llama", ["tp=2"]),
        ("llama", ["dp_replicate=2"]),
        ("phi3", ["tp=2"]),
        ("llama", ["pp=2", "tp=2", "microbatches=2"]),
    ],
    ids=_named,
)
def test_states_in_eight_bits_step_as_in_one_process(four, plan, family, sets):
    """In float64: in float32 a number at the border of two codes falls to either of them."""
    for result in four.run(
        "optimizer_jobs.train",
        model=family,
        plan=plan(family, EIGHT),
        overrides=[*FP64, *sets],
        double=True,
    ):
        assert result["muon"][0] < 1e-5, result["muon"]
        assert result["others"][0] < 1e-6, result["others"]


@pytest.mark.parametrize("new", [["tp=2"], ["tp=1"]], ids=_named)
def test_states_in_eight_bits_go_on_on_another_mesh(four, plan, tmp_path, new):
    """What is loaded is what was saved, bit for bit, whatever the mesh."""
    goes_on(four, plan("phi3", EIGHT), tmp_path, new, "exp_avg_sq")


def goes_on(four, path, folder, new, state):
    """phi3 saved at tp 2 goes on, on the same mesh to the bit, with a state of the optimizer."""
    for result in four.run(
        "optimizer_jobs.resume",
        model="phi3",
        plan=path,
        old=[*FP32, "tp=2"],
        new=[*FP32, *new],
        folder=str(folder / "run"),
    ):
        assert result["equal"]
        assert any(name.endswith(state) for name in result["states"])
        same = result["right"] if new == ["tp=2"] else pytest.approx(result["right"], rel=1e-3)
        assert result["losses"] == same


def test_experts_with_states_in_eight_bits_go_on_on_another_mesh(four, plan, tmp_path):
    for result in four.run(
        "optimizer_jobs.resume",
        model="qwen3_moe",
        plan=plan("qwen3_moe", "root : adamw(state = int8, block = 8)"),
        old=[*FP32, "ep=2"],
        new=[*FP32, "tp=2"],
        folder=str(tmp_path / "run"),
    ):
        assert result["equal"]
        assert result["losses"] == pytest.approx(result["right"], rel=1e-3)


@pytest.mark.parametrize(
    ("family", "sets", "more"),
    [
        ("phi3", ["tp=2"], ""),
        ("phi3", ["tp=1"], "state = bf16"),
        ("llama", ["dp_replicate=2"], ""),
        ("llama", ["tp=2"], "state = bf16"),
    ],
    ids=_named,
)
def test_states_on_the_host_step_as_on_the_device(four, plan, tmp_path, family, sets, more):
    written = [", ".join(filter(None, (away, more))) for away in ("", "offload = states")]
    rules = [MIXED.format(f", {text}" if text else "", text) for text in written]
    names = [plan(family, text, name) for text, name in zip(rules, "ab", strict=True)]
    for equal, away in four.run(
        "optimizer_jobs.offloaded",
        model=family,
        plans=names,
        overrides=[*FP32, *sets],
        folder=str(tmp_path / "run"),
    ):
        assert equal
        assert away == [{False}, {True}]


def test_a_script_keeps_states_alike(four, plan):
    rules = "root : adamw(state = int8, block = 8, offload = states)"
    for one, other in four.run(
        "optimizer_jobs.script",
        model="phi3",
        plan=plan("phi3", rules),
        overrides=[*FP32, "tp=2"],
    ):
        assert one == other


CLASSES = """
    root                            : class("own_optimizers:Lion", betas = [0.9, 0.98])
    model.layers.*.*layernorm       : class("own_optimizers:Normalized", weight_decay = 0)
    model.layers.*.self_attn.o_proj : muon
"""


@pytest.mark.parametrize(
    "sets", [["tp=2"], ["dp_replicate=2"], ["pp=2", "microbatches=2"]], ids=_named
)
def test_classes_of_the_user_step_as_in_one_process(four, plan, sets):
    """In float64: Lion takes signs, also of what is zero up to rounding."""
    for result in four.run(
        "optimizer_jobs.train",
        model="llama",
        plan=plan("llama", CLASSES),
        overrides=[*FP64, *sets],
        double=True,
    ):
        assert result["muon"][0] < 1e-5, result["muon"]


def test_a_script_steps_classes_alike(four, plan):
    for one, other in four.run(
        "optimizer_jobs.script",
        model="phi3",
        plan=plan("phi3", CLASSES),
        overrides=[*FP32, "tp=2"],
    ):
        assert one == other


@pytest.mark.parametrize("new", [["tp=2"], ["tp=1"]], ids=_named)
def test_classes_go_on_on_another_mesh(four, plan, tmp_path, new):
    goes_on(four, plan("phi3", CLASSES), tmp_path, new, "exp_avg")
