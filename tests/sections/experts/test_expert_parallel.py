"""Divided experts, all ranks as threads: whatever the router decides, and what mistakes do."""

import contextlib
import copy
import threading
from unittest import mock

import pytest
import torch
from helpers import compiled_of, sampled, simulated
from torch import distributed
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GptOssConfig, Llama4TextConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import planc
from planc.diagnostics.diagnostic import Sink
from planc.elaborate.expert_axes import legal_sizes
from planc.files.resources import PLANS
from planc.ops.document import digest, dumps, loads
from planc.proof.small_mesh import with_experts
from planc.runtime.meshes import Meshes
from planc.runtime.standalone import collectives, expert_parallel, fsdp
from planc.runtime.standalone.expert_parallel import dispatch_experts, mesh_of_experts
from planc.simulate.thread_ranks import run_ranks

EXPERTS, HIDDEN, CHOSEN, TOKENS, DATA, TENSOR = 8, 16, 2, 7, 2, 2
FAMILIES = {
    "mixtral": (MixtralExperts, MixtralConfig, "num_local_experts"),
    "gpt_oss": (GptOssExperts, GptOssConfig, "num_local_experts"),
    "llama4": (Llama4TextExperts, Llama4TextConfig, "num_local_experts"),
}
ROUTES = {
    "each its own": lambda index: index,
    "all to one": lambda _: torch.tensor([5, 5]).expand(DATA, TOKENS, CHOSEN),
    "none to most": lambda index: index % 3,
    "no expert": lambda index: torch.where(index > 5, EXPERTS, index),
}


def experts(family, how="eager"):
    made, config, count = FAMILIES[family]
    fields = {count: EXPERTS, "hidden_size": HIDDEN, "intermediate_size": 24}
    values = config(**fields)
    values._experts_implementation = how
    module = made(values)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def inputs(family, route):
    """Hidden states, and what the router decides, for each data rank."""
    if family == "llama4":
        return (torch.randn(DATA, EXPERTS * TOKENS, HIDDEN),)
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(DATA * TOKENS)])
    index = ROUTES[route](index.view(DATA, TOKENS, CHOSEN))
    return torch.randn(DATA, TOKENS, HIDDEN), index, torch.rand(DATA, TOKENS, CHOSEN)


def forward_and_back(module, given, at, upstream):
    """The output, and the gradients of hidden states and weights."""
    mine = [v[at].clone().requires_grad_(v.is_floating_point()) for v in given]
    out = module(*mine)
    (out * upstream[at]).sum().backward()
    return [out.detach(), *(v.grad for v in mine if v.requires_grad)]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("dispatch", "ranks", "chunks"),
    [
        ("all_to_all", 2, 1),
        ("all_to_all", 4, 1),
        ("all_reduce", 2, 1),
        ("all_to_all", 4, 2),
        ("all_to_all", 2, 5),  # a chunk is empty: a rank sends 4 tokens, or 3
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_routing(family, dispatch, ranks, chunks, route):
    """Outputs and all gradients are those of the whole module, also where a rank gets no token."""
    if family != "mixtral" and route in ("all to one", "no expert"):
        pytest.skip("one family shows it; gpt_oss has no number for no expert")
    torch.manual_seed(0)
    whole, given = experts(family), inputs(family, route)
    upstream = torch.randn_like(given[0])
    right = [forward_and_back(whole, given, d, upstream) for d in range(DATA)]
    parts = [copy.deepcopy(whole) for _ in range(DATA * TENSOR)]
    for part in parts:
        part.zero_grad()
    seen = {}

    def rank(number):
        root = init_device_mesh("cpu", (DATA, TENSOR), mesh_dim_names=("dp_shard", "tp"))
        divided = mesh_of_experts(root, ("dp_shard", "tp"), ("ep_shard", "ep"), ranks)
        shared = root["tp"] if dispatch == "all_to_all" else None
        module = parts[number]
        options = {"shared": shared, "batched": family == "llama4", "chunks": chunks}
        dispatch_experts(module, divided["ep"], dispatch, **options)
        found = forward_and_back(module, given, number // TENSOR, upstream)
        first = EXPERTS // ranks * divided["ep"].get_local_rank()
        for (name, mine), full in zip(module.named_parameters(), whole.parameters(), strict=True):
            gradient = mine.grad.to_local().clone()
            distributed.all_reduce(gradient, group=divided["ep_shard"].get_group())
            seen[number, name] = gradient, full.grad[first : first + EXPERTS // ranks]
        seen[number, ""] = found, right[number // TENSOR]
        assert module.num_experts == EXPERTS

    failure = run_ranks(DATA * TENSOR, rank, 60)
    assert failure is None, failure.error or failure.message
    assert len(seen) == DATA * TENSOR * (1 + len(list(whole.parameters())))
    for found, wanted in seen.values():
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_grouped_product_of_transformers():
    torch.manual_seed(0)
    eager, given = experts("mixtral"), inputs("mixtral", "each its own")
    grouped = experts("mixtral", "grouped_mm")
    grouped.load_state_dict(eager.state_dict())
    right = eager(*(v[0] for v in given))
    seen = []

    def rank(number):
        module = copy.deepcopy(grouped)
        dispatch_experts(module, init_device_mesh("cpu", (2,)), "all_to_all")
        seen.append(module(*(v[0] for v in given)))

    assert run_ranks(2, rank, 60) is None
    for out in seen:
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)


# The proof ---------------------------------------------------------------------------------------

MIXTRAL = "mixtral-8x7b", "mixtral"
SETTINGS = ("tp=2", "ep=4", "sequence=false", "recompute=false")


def test_mixtures_are_proved(uncached):
    verdict, findings = simulated(*MIXTRAL, SETTINGS, world=16)
    assert (verdict.verdict, findings) == ("proved", [])
    assert verdict.outcome.worst < 1e-5
    assert "expert on ep" in [s.name for s in verdict.sections]


def twice(ctx, gradient):
    return 2 * collectives.exchange_rows(gradient, *ctx.back), None, None, None


by_all_to_all, exchanged = expert_parallel.by_all_to_all, collectives.exchange_rows
STAYING = threading.local()  # of a rank, whose thread patches nothing: others run beside it


def kept(own, hidden, index, weights):
    """Tokens are sent to their experts, and what these compute is not sent back."""
    STAYING.now = True
    try:
        return by_all_to_all(own, hidden, index % own.count + own.count * own.group.rank(), weights)
    finally:
        STAYING.now = False


def unless_staying(rows, *others):
    return rows if getattr(STAYING, "now", False) else exchanged(rows, *others)


@contextlib.contextmanager
def staying():
    kinds = {("all_to_all", False): kept}
    with (
        mock.patch.object(collectives, "exchange_rows", unless_staying),
        mock.patch.dict(expert_parallel.KINDS, kinds),
    ):
        yield


def unweighted(own, hidden, index, weights):
    return by_all_to_all(own, hidden, index, weights.detach())


FAULTS = {
    "a gradient summed twice": lambda: mock.patch.object(
        expert_parallel.Exchange, "backward", staticmethod(twice)
    ),
    "no divisor": lambda: mock.patch.object(fsdp, "divide_gradients", lambda *_: None),
    "no gradient of the router": lambda: mock.patch.dict(
        expert_parallel.KINDS, {("all_to_all", False): unweighted}
    ),
    "tokens that stay": staying,
    "a part of the tokens alone": lambda: mock.patch.object(
        expert_parallel.JoinParts,
        "backward",
        staticmethod(lambda ctx, g: (0 * expert_parallel.part_of_rows(g, ctx.group), None, None)),
    ),
}


@pytest.mark.parametrize("fault", sampled(FAULTS, 2))
def test_mistakes_are_refuted(uncached, fault):
    with FAULTS[fault]():
        verdict, findings = simulated(*MIXTRAL, SETTINGS, world=16)
    assert verdict.verdict == "refuted"
    assert "error" in {d.severity for d in findings}


def backwards(chunks):
    """The outputs of chunks, the last one first."""
    return torch.cat(in_turn(chunks).chunk(2)[::-1])


def half(ctx, _):
    gradient, ctx.sending.gradient = ctx.sending.gradient, None
    ctx.sending.end()
    return gradient / 2, None


in_turn = expert_parallel.in_turn
CHUNKS = """plan chunks for any

extend "mixtral"

override expert on ep {
    $experts : dispatch(all_to_all, chunks = 2)
}
"""


@pytest.mark.parametrize(
    "fault",
    [
        (expert_parallel, "in_turn", backwards),
        (collectives.SendRows, "backward", staticmethod(half)),
        None,
    ],
    ids=["chunks in another order", "half the gradient of what was sent", "none"],
)
def test_mistakes_of_chunks_are_refuted(uncached, tmp_path, fault):
    path = tmp_path / "chunks.plan"
    path.write_text(CHUNKS)
    with mock.patch.object(*fault) if fault else contextlib.nullcontext():
        verdict, _ = simulated("mixtral-8x7b", path, ["ep=2"], world=8)
    assert verdict.verdict == ("refuted" if fault else "proved")


@pytest.mark.parametrize("model", sampled(["glm-4.5-air", "deepseek-v3", "qwen3.5-35b-a3b"], 1))
def test_experts_of_a_block_that_is_recomputed_before_their_backward_pass(model):
    """Shared experts run after the others, so their backward pass, which computes the block again,
    comes first; the last block's experts stay gathered, on two ranks that shard them.
    """
    plan = {"glm-4.5-air": "qwen3_moe", "deepseek-v3": "deepseek_v3"}.get(model, "qwen3_next")
    verdict, findings = simulated(model, plan, ["ep=2"], world=8)
    assert verdict.verdict == "proved", [d.message for d in findings]


def test_a_lowered_plan_is_read_as_it_was_written():
    lowered = planc.lower("mixtral-8x7b", "mixtral", world_size=4, overrides=["ep=2"])
    assert lowered.experts is not None
    read = loads(dumps(lowered), "a test", Sink())
    assert read.experts == lowered.experts
    assert (dumps(read), digest(read)) == (dumps(lowered), digest(lowered))


# Meshes ------------------------------------------------------------------------------------------


def test_legal_sizes():
    assert sorted(set(legal_sizes([4, 2]))) == [1, 2, 4, 8]
    assert sorted(set(legal_sizes([6, 1, 4]))) == [1, 2, 4, 8, 12, 24]
    assert sorted(set(legal_sizes([]))) == []


def test_a_mesh_of_98304_ranks():
    settings = ["tp=8", "ep=8", "dp_replicate=12"]
    plan = planc.lower("mixtral-8x7b", "mixtral", world_size=98_304, overrides=settings)
    assert plan.experts.sizes == {"ep_shard": 1_024, "ep": 8}
    assert plan.axis_size("dp_replicate", "ep_shard", "ep") == plan.world_size == 98_304


def lowered(*settings, world=8):
    return planc.lower("mixtral-8x7b", "mixtral", world_size=world, overrides=settings)


@pytest.mark.parametrize(
    ("settings", "groups"),
    [(("tp=2", "ep=2"), 0), (("tp=4", "ep=4"), 0), (("tp=2", "ep=4"), 2), (("tp=2", "ep=8"), 2)],
)
def test_groups_that_are_made(settings, groups):
    """None where `ep` is whole axes with groups of their own, and some are left; else two."""
    plan, made = lowered(*settings), {}

    def rank(number):
        meshes = Meshes(plan, "cpu")
        before = distributed.distributed_c10d._world.group_count
        ranks, rest = meshes["ep"], meshes["ep_shard"]
        made[number] = ranks.size(), rest.size(), ranks.ndim, rest.ndim
        assert meshes["ep"] is ranks or meshes["ep"] == ranks
        names = {g.group_name for g in (ranks.get_group(), rest.get_group())}
        made[number] += (len(names - {m.get_group().group_name for m in _axes(meshes)}), before)

    assert run_ranks(8, rank, 60) is None
    sizes = tuple(plan.experts.sizes[n] for n in ("ep", "ep_shard"))
    assert {m[:4] for m in made.values()} == {(*sizes, 1, 1)}
    assert {m[4] for m in made.values()} == {groups}


def _axes(meshes):
    return [meshes[name] for name in meshes.root.mesh_dim_names]


@pytest.mark.parametrize(
    ("settings", "sizes", "wanted"),
    [
        (("tp=2", "ep=2"), {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}),
        (("tp=2", "ep=4"), {"dp_shard": 2, "tp": 2}, {"dp_shard": 4, "tp": 2, "ep": 4}),
        (("tp=2", "ep=8"), {"dp_shard": 1, "tp": 4}, {"dp_shard": 1, "tp": 4, "ep": 4}),
        (("ep=4",), {"dp_shard": 2, "tp": 1}, {"dp_shard": 4, "tp": 1, "ep": 2}),
    ],
)
def test_small_meshes(settings, sizes, wanted):
    """Ranks with equal experts remain, and an axis that is cut in two stays so, where it fits."""
    compiled = compiled_of(*MIXTRAL, settings, world=64)
    found = with_experts({"dp_replicate": 1, **sizes}, compiled.plan.mesh)
    assert found == {"dp_replicate": 1, **wanted}


def replicated(model, **keywords):
    replicate(model, mesh=init_device_mesh("cpu", (2,)), **keywords)


def sharded(model, *sizes, **keywords):
    names = ("dp_replicate", "dp_shard")[-len(sizes) :]
    fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names), **keywords)


DTYPES = [torch.float64, torch.float32, torch.float16]
PLACED = {  # the ranks, and what shards or replicates a weight over them
    "replicated": (2, replicated),
    "one rank has the shard": (1, lambda *a, **k: sharded(*a, 1, **k)),
    "a shard of one rank, replicated": (2, lambda *a, **k: sharded(*a, 2, 1, **k)),
    "sharded": (2, lambda *a, **k: sharded(*a, 2, **k)),
}


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_divided_once(placed, dtype):
    """In every dtype that they are reduced in, however many ranks have the shard."""
    (ranks, shard), found = PLACED[placed], {}

    def rank(number):
        model = torch.nn.Linear(4, 4, bias=False)
        shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        fsdp.divide_gradients(model, 8, "cpu")
        (4 * model(torch.ones(1, 4))).sum().backward()
        found[number] = model.weight.grad.full_tensor()

    assert run_ranks(ranks, rank, 60) is None
    assert all(torch.equal(g, torch.full((4, 4), ranks / 2)) for g in found.values())


def test_stages_have_experts_of_their_own(tmp_path):
    """Each stage of a pipeline divides those of its blocks."""
    text = f"""plan t for mixtral
extend "{PLANS}/mixtral.plan"
override mesh {{
    pp           = 2
    dp_replicate = 1
    dp_shard     = auto
    tp           = 1
    ep           = 2
}}
pipeline on pp {{
    schedule     = gpipe
    microbatches = 2
    stages       = even(model.layers.*)
}}
"""
    path = tmp_path / "t.plan"
    path.write_text(text)
    plan = planc.lower("mixtral-8x7b", str(path), world_size=8)
    found = [[str(o.modules) for o in s.ops if o.KIND == "dispatch_experts"] for s in plan.stages]
    halves = "model.layers[0:16].mlp.experts", "model.layers[16:32].mlp.experts"
    assert found == [[half] for half in halves]
    verdict, findings = simulated("mixtral-8x7b", path, (), world=8)
    assert (verdict.verdict, findings) == ("proved", [])
