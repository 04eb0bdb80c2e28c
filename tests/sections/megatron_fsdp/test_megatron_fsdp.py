"""The real megatron_fsdp trains what one process trains, as planc calls it.

There is no CUDA here: `fake_cuda.py` says what stands in for streams and events. Everything else is
the package's own code, on four gloo processes.
"""

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("megatron_fsdp")

LIMIT = 1e-5  # of losses and, relative, of norms and of weights; measured: 2e-6
ADAM = 1e-3  # of weights after steps of Adam, which makes much of gradients that are all but 0
PLAN = """
plan small for {family}

mesh {{
    dp_replicate = 1
    dp_shard     = auto
    dp_in        = 1
}}
{more}
fsdp on dp_shard * dp_in, replicate on dp_replicate {{
    backend  = megatron
    strategy = {strategy}
    {lines}
    {blocks} : unit
    root     : unit
}}
"""


@pytest.fixture
def written(tmp_path):
    """Writes a plan and gives its path."""

    def write(
        family="llama", blocks="model.layers.*", strategy="optim_grads_params", lines="", more=""
    ):
        path = tmp_path / "small.plan"
        path.write_text(
            PLAN.format(family=family, blocks=blocks, strategy=strategy, lines=lines, more=more)
        )
        return str(path)

    return write


def right(results, factor=1.0, weights=LIMIT):
    """Every rank has losses, norms and weights as they are without the package."""
    assert len(results) == 4
    for found in results:
        assert found["names"]
        assert found["losses"] < LIMIT
        assert abs(found["norms"] - (factor - 1)) < LIMIT
        assert found["weights"] < weights


def train(four, plan, **others):
    return four.run(
        "megatron_fsdp_jobs.train", timeout=200, plan=plan, **{"model": "llama", **others}
    )


@pytest.mark.parametrize(("kind", "weights"), [("sgd", LIMIT), ("adamw", ADAM)])
def test_fully_sharded(four, written, kind, weights):
    """With decay and dampening, which the package's own first step on zeros would get wrong."""
    right(train(four, written(), kind=kind), weights=weights)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_accumulation(four, written, strategy):
    right(train(four, written(strategy=strategy), passes=3))


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_hybrid(four, written, strategy):
    right(train(four, written(strategy=strategy), passes=2, overrides=["dp_replicate=2"]))


def test_two_axes_are_one(four, written):
    right(train(four, written(), overrides=["dp_in=2"]))


def test_outer_shards_are_sums(four, written):
    """Four times the gradient of the mean: that is what the plan has to say."""
    plan = written(lines="outer_strategy = optim\n    divide = 1")
    right(train(four, plan, overrides=["dp_replicate=2"]), factor=4.0)


def test_sums(four, written):
    right(train(four, written(lines="divide = 1")), factor=4.0)


@pytest.mark.parametrize(
    ("model", "family", "blocks"),
    [
        ("llama-tied", "llama", "model.layers.*"),
        ("qwen3", "qwen3", "model.layers.*"),
        ("gpt2", "gpt2", "transformer.h.*"),
        ("mixtral", "mixtral", "model.layers.*"),
    ],
)
@pytest.mark.parametrize("copies", [1, 2])
def test_families(four, written, model, family, blocks, copies):
    """Ties, biases, and what the package takes for experts because of its name."""
    plan = written(family=family, blocks=blocks)
    right(train(four, plan, model=model, overrides=[f"dp_replicate={copies}"]))


def test_options(four, written):
    lines = "megatron(main_params = none, main_grads = fp32, disable_bucketing = true)"
    right(train(four, written(lines=lines)))


def test_with_recomputing(four, written):
    more = "checkpoint {\n    model.layers.* : full\n}"
    right(train(four, written(more=more), passes=2))


def test_compiled(four, written):
    more = "compile {\n    model.layers.* : block\n}"
    right(train(four, written(more=more)))


# Beside torch's FSDP -----------------------------------------------------------------------------


def beside(four, plan, **others):
    return four.run(
        "megatron_fsdp_jobs.beside", timeout=200, plan=plan, **{"model": "llama", **others}
    )


def test_frozen_parameters(four, written):
    more = "train {\n    model.embed_tokens : frozen\n    model.layers[0].mlp : frozen\n}"
    right(beside(four, written(more=more)))


def test_adapters(four, written):
    pytest.importorskip("peft")
    more = "adapters {\n    model.layers.*.self_attn.{q,v}_proj : lora(rank = 4)\n}"
    right(beside(four, written(more=more)), weights=ADAM)


def test_mixed_precision(four, written):
    """bf16 to compute in, fp32 to add up and to optimize in: torch's numbers to the last bit."""
    lines = "precision(param = bf16, reduce = fp32)"
    right(beside(four, written(lines=lines), dtype="bfloat16"))


# The handle --------------------------------------------------------------------------------------


def test_what_apply_and_the_script_do(four, written):
    assert (
        four.run("megatron_fsdp_jobs.script", plan=written(), overrides=["dp_replicate=2"])
        == [True] * 4
    )


def test_what_the_handle_refuses(four, written):
    for found in four.run("megatron_fsdp_jobs.refused", plan=written()):
        assert found == {
            "unshard": "PL499",
            "step": "pass it to planc's `run.optimizer`",
            "again": "PL493",
        }


TORCH = """
plan small for llama

mesh {
    dp_replicate = 2
    dp_shard     = auto
}

fsdp on dp_shard, replicate on dp_replicate {
    model.layers.* : unit
    root           : unit
}
"""


@pytest.mark.parametrize("first", ["megatron", "torch"])
@pytest.mark.parametrize("then", ["megatron", "torch"])
def test_what_is_saved_goes_on_under_another_plan(four, written, tmp_path, first, then):
    """Two steps, a checkpoint, two more: as four in one process, whoever does which two."""
    other = tmp_path / "torch.plan"
    other.write_text(TORCH)
    plans = {"megatron": written(), "torch": str(other)}
    folder = str(tmp_path / "last")
    begun = four.run("megatron_fsdp_jobs.begin", plan=plans[first], folder=folder)
    ended = four.run("megatron_fsdp_jobs.resume", plan=plans[then], folder=folder)
    for start, end in zip(begun, ended, strict=True):
        assert end["step"] == 2 and start["error"] < LIMIT and end["error"] < LIMIT
        assert end["weights"] < ADAM


def test_optimizer_state_that_some_ranks_lack(four, written, tmp_path):
    """A parameter of 64 numbers is on one rank alone, and so is its state."""
    folder = str(tmp_path / "last")
    four.run("megatron_fsdp_jobs.begin", plan=written(strategy="optim_grads"), folder=folder)
    for found in four.run(
        "megatron_fsdp_jobs.resume", plan=written(strategy="optim"), folder=folder
    ):
        assert found["step"] == 2 and found["error"] < LIMIT and found["weights"] < ADAM


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_weights_from_files_and_back(four, written, tmp_path, strategy):
    """`run.load` of safetensors, whole again and exported: every bit as it was."""
    plan = written(strategy=strategy)
    for found in four.run("megatron_fsdp_jobs.files", plan=plan, folder=str(tmp_path / "files")):
        assert found == {"loaded": True, "exported": True, "logits": True}
