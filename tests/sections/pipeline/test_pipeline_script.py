"""The emitted Python of pipelines computes, without planc, what `apply` computes, bit for bit."""

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from helpers import sampled
from loop_plans import LONG, SIZES
from test_script import WIDTH, ruff
from torch.distributed.tensor import DTensor

import planc
from planc.emit.python.script import render
from planc.ops.document import digest
from planc.ops.uneven_groups import uneven_groups
from planc.runtime.executor import apply_lowered
from planc.runtime.standalone.shards import plain_name
from planc.simulate.thread_ranks import run_ranks

pytestmark = pytest.mark.usefixtures("script_alone")
STANDALONE = Path(planc.__file__).parent / "runtime" / "standalone"
READING = """plan reading for llama

extend "llama"

load {
    init    = meta
    weights = slices
}
"""
ADAPTED = """plan adapted for llama

extend "llama"

adapters {
    model.layers.*.self_attn.{q,v}_proj : lora(rank = 2, init = random)
}
"""
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TIED = {"tie_word_embeddings": True}
TWO = ("pp=2", "microbatches=2")
LIMIT = 0.01
"""A norm that all gradients together exceed."""
CASES = {
    "llama": (2, "Llama", {}, "llama", TWO),
    "ties, tp and fsdp": (8, "Llama", TIED, "llama", (*TWO, "tp=2")),
    "zbv": (2, "Llama", TIED, "llama", (*TWO, "schedule=zbv")),
    "parts of the loss": (4, "Llama", {}, "llama", (*TWO, "tp=2", "loss_chunks=2")),
    "cp": (4, "Llama", {}, "long.plan", TWO),
    "adapters": (4, "Llama", {}, "adapted.plan", (*TWO, "param_dtype=fp32")),
    "ep": (4, "Mixtral", EXPERTS, "mixtral", (*TWO, "ep=2")),
    "three stages": (3, "Llama", {}, "llama", ("pp=3", "microbatches=4")),
}


def small(kind, changes):
    """A small model of float32, equal on every rank."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.fixture
def lowered(tmp_path, monkeypatch):
    (tmp_path / "long.plan").write_text(LONG)
    (tmp_path / "adapted.plan").write_text(ADAPTED)
    monkeypatch.chdir(tmp_path)

    def made(name):
        ranks, kind, changes, plan, settings = CASES[name]
        precise = () if plan.endswith(".plan") else ("param_dtype=fp32",)
        given = [*precise, *settings]
        return planc.lower(small(kind, changes), plan, world_size=ranks, overrides=given)

    return made


@pytest.mark.parametrize("name", ["ties, tp and fsdp", "zbv"])
def test_it_is_well_made(lowered, name):
    plan = lowered(name)
    source = render(plan, digest=digest(plan))
    assert source == render(plan, digest=digest(plan))
    formatted = ruff(source, "format", "--diff")
    assert formatted.returncode == 0, formatted.stdout
    checked = ruff(source, "check", "--select", "E,F,I,B,UP,SIM,RUF,ARG")
    assert checked.returncode == 0, checked.stdout
    assert all(len(line) <= WIDTH for line in source.splitlines())
    imported = {n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} == {
        "torch",
        "contextlib",
        "itertools",
        "math",
    }
    assert "\n    if pipeline_rank == 0:\n        keep_stages_at_0(model, mesh)\n" in source
    assert "\n    elif pipeline_rank == 1:\n        keep_stages_at_1(model, mesh)\n" in source


def executed(lowered):
    source = render(lowered, digest=digest(lowered))
    space = {"__name__": "script"}
    exec(compile(source, "script", "exec"), space)
    homes = {getattr(value, "__module__", None) or "" for value in space.values()}
    assert not [home for home in homes if home.startswith("planc")]
    return space


def batches():
    """Two batches with as many valid labels as `count`."""
    torch.manual_seed(3)
    made = []
    for ignored in (3, 11):
        ids = torch.randint(1, SIZES["vocab_size"], (4, 16))
        labels = ids.clone()
        labels[0, :ignored] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made, sum((b["labels"][:, 1:] != -100).sum() for b in made).float()


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def trained(lowered, kind, changes, space=None):
    """The losses and gradients of a step on every rank: of `apply`, or of the script's names."""
    models = [small(kind, changes) for _ in range(lowered.world_size)]
    parts = next((a.size for a in lowered.axes if a.name == "cp"), 1)
    whole, count = batches()
    found = {}

    def rank(number):
        model, given = models[number], whole
        if space:
            mesh = space["build_mesh"]("cpu")
            space["parallelize"](model, mesh)
            if parts > 1:
                given = [model.context_parallel.batch(batch) for batch in given]
            given = [{**batch, "num_items_in_batch": count / parts} for batch in given]
            losses = space["forward_backward"](model, mesh, given)
            clip = space["clip_grad_norm"]
        else:
            run = apply_lowered(model, lowered, digest=digest(lowered), device_type="cpu")
            run.forward_backward(given)
            losses, clip = [], lambda _model, limit: run.clip_grad_norm_(limit)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        gradients = {n: local(p.grad) for n, p in trained.items()}
        norm = clip(model, LIMIT)
        clipped = {n: local(p.grad) for n, p in trained.items()}
        found[number] = losses, gradients, norm, clipped

    failure = run_ranks(lowered.world_size, rank, seconds=240)
    assert failure is None, failure
    return found


@pytest.mark.parametrize("name", sampled(CASES, 2))
def test_the_script_computes_the_same_bits(lowered, name):
    _, kind, changes, _, settings = CASES[name]
    plan = lowered(name)
    mine, theirs = trained(plan, kind, changes), trained(plan, kind, changes, executed(plan))
    microbatches = int(settings[1].partition("=")[2])
    assert {len(losses) for losses, *_ in theirs.values()} == {0, 2 * microbatches}
    [norm] = {float(norm) for _, _, norm, _ in (*mine.values(), *theirs.values())}
    assert norm > 2 * LIMIT
    for number, (_, gradients, _, clipped) in mine.items():
        assert gradients.keys() == theirs[number][1].keys()
        for key, gradient in gradients.items():
            assert gradient.abs().max() > 0, key
            assert torch.equal(gradient, theirs[number][1][key]), (number, key)
            assert torch.equal(clipped[key], theirs[number][3][key]), (number, key)
            torch.testing.assert_close(clipped[key], gradient * (LIMIT / (norm + 1e-6)))


def test_definitions_have_names_of_their_own():
    """Two of one name would be one in a script."""
    seen = Counter(
        node.name
        for file in STANDALONE.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if hasattr(node, "name")
    )
    assert [name for name, times in seen.items() if times > 1] == []


# Process groups that only some stages use -------------------------------------------------------


def test_groups_of_some_stages_are_created_by_all_ranks():
    """The first stage has no experts: its ranks take part in creating the groups of theirs."""
    changes = {**QWEN, "mlp_only_layers": [0, 1]}
    plan = planc.lower(
        small("Qwen3Moe", changes),
        "qwen3_moe",
        world_size=8,
        overrides=["param_dtype=fp32", "pp=2", "microbatches=2", "ep=2"],
    )
    (made,) = uneven_groups(plan, plan.context())
    assert made.name == "expert_mesh"
    assert "    make_groups(mesh)\n    pipeline_rank = " in render(plan, digest=digest(plan))
    mine = trained(plan, "Qwen3Moe", changes)
    theirs = trained(plan, "Qwen3Moe", changes, executed(plan))
    for number, (_, gradients, *_) in mine.items():
        assert gradients
        for key, gradient in gradients.items():
            assert torch.equal(gradient, theirs[number][1][key]), (number, key)


def test_the_script_reads_the_weights_of_its_stages(tmp_path, lowered):
    """From a folder that has those of all stages."""
    weights = small("Llama", {})
    weights.save_pretrained(tmp_path / "weights")
    (tmp_path / "reading.plan").write_text(READING)
    plan = planc.lower(weights, "reading.plan", world_size=2, overrides=["pp=2", "microbatches=2"])
    space, right, found = executed(plan), dict(weights.named_parameters()), {}
    with torch.device("meta"):
        models = [transformers.LlamaForCausalLM(weights.config) for _ in range(2)]

    def rank(number):
        space["parallelize"](models[number], space["build_mesh"]("cpu"))
        space["load_weights"](models[number], "weights", "cpu")
        found[number] = {plain_name(n): local(p) for n, p in models[number].named_parameters()}

    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure
    assert not found[0].keys() & found[1].keys()
    assert {**found[0], **found[1]}.keys() == right.keys()
    for name, tensor in {**found[0], **found[1]}.items():
        assert torch.equal(tensor, right[name]), name
