"""Experts that take a limited number of each row's tokens: which ones, and what mistakes do."""

import math
import threading
from unittest import mock

import pytest
import torch
from helpers import compiled_of, sampled, simulated
from torch.distributed.device_mesh import init_device_mesh

import planc
from planc.ops.expert_capacity import LimitExperts
from planc.runtime.standalone import expert_capacity
from planc.runtime.standalone.context_tokens import order_of
from planc.runtime.standalone.documents import CURRENT
from planc.runtime.standalone.expert_capacity import Capacity, Rows
from planc.simulate.thread_ranks import run_ranks

PLAN = """plan limited for any

extend "qwen3_moe"

override expert on ep {
    $experts : dispatch(all_to_all, capacity = CAPACITY, drop = DROP)
}
"""
MODEL = "qwen3-30b-a3b"
ROWS, TOKENS, EXPERTS, CHOSEN = 3, 16, 6, 2


def plan(folder, drop="probs", capacity=1.25):
    path = folder / "limited.plan"
    path.write_text(PLAN.replace("CAPACITY", str(capacity)).replace("DROP", drop))
    return str(path)


def by_hand(index, weights, tokens, capacity, drop):
    """Which choices are kept, one row and one expert after the other."""
    kept = torch.zeros_like(index, dtype=torch.bool)
    for row in range(len(index)):
        valid = [t for t in range(index.shape[1]) if tokens[row, t]]
        slots = math.ceil(len(valid) * index.shape[2] * capacity / EXPERTS - 1e-9)
        for expert in range(EXPERTS):
            asks = [(t, k) for t in valid for k in range(CHOSEN) if index[row, t, k] == expert]
            if drop == "probs":
                asks.sort(key=lambda at: -float(weights[row, at[0], at[1]].bfloat16()))
            for t, k in asks[:slots]:
                kept[row, t, k] = True
    return kept


def routed():
    """The experts of the tokens of some rows, their weights, and which tokens are no padding."""
    torch.manual_seed(0)
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(ROWS * TOKENS)])
    index = index.view(ROWS, TOKENS, CHOSEN)
    index[1] = torch.tensor([4, 1])  # equal tokens, which differ by a rounding
    weights = torch.rand(ROWS, TOKENS, CHOSEN)
    weights[1] = 0.3 + 1e-7 * torch.rand(TOKENS, CHOSEN)
    tokens = torch.ones(ROWS, TOKENS, dtype=torch.long)
    tokens[0, :5] = 0
    tokens[2, -3:] = 0
    return index, weights, tokens


def rows_of(tokens):
    return Rows((), {"input_ids": tokens, "attention_mask": tokens})


@pytest.mark.parametrize("drop", ["probs", "position"])
@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.25, 6.0])
def test_which_tokens_are_kept(drop, capacity):
    """Slots are of the tokens that are no padding, which gets none."""
    index, weights, tokens = routed()
    CURRENT.rows = rows_of(tokens)
    limit = Capacity(EXPERTS, capacity, drop)
    kept, dropped = limit.select_choices(index.flatten(0, 1), weights.flatten(0, 1))
    right = by_hand(index, weights, tokens, capacity, drop)
    assert torch.equal(kept.view_as(index), right)
    assert int(dropped) == int((~right & (tokens[..., None] == 1)).sum())
    assert (int(dropped) == 0) == (capacity == EXPERTS)
    CURRENT.rows = None
    with pytest.raises(ValueError, match="rows are not known"):
        limit.select_choices(index.flatten(0, 1), weights.flatten(0, 1))


@pytest.mark.parametrize("drop", ["probs", "position"])
@pytest.mark.parametrize("balance", ["none", "head_tail"])
def test_ranks_with_parts_of_rows_keep_the_same(drop, balance):
    index, weights, tokens = routed()
    right = by_hand(index, weights, tokens, 1.0, drop)
    seen = {}

    def rank(number):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        own = order_of(tokens[:, : TOKENS // 4], 4, balance).view(4, -1)[number]
        CURRENT.rows = rows_of(tokens[:, own])
        limit = Capacity(EXPERTS, 1.0, drop, mesh["cp"], balance)
        given = (one[:, own].flatten(0, 1) for one in (index, weights))
        seen[number] = limit.select_choices(*given)[0].view(ROWS, -1, CHOSEN), right[:, own]

    assert run_ranks(4, rank, 60) is None
    assert len(seen) == 4
    assert all(torch.equal(*both) for both in seen.values())


# The proof ---------------------------------------------------------------------------------------

MESHES = [
    ("probs", ["tp=2", "ep=4"]),
    ("position", ["cp=2", "ep=2"]),
    ("probs", ["tp=2", "ep=2", "etp=2"]),
    ("probs", ["cp=2", "tp=2"]),
    ("position", ["pp=2", "ep=2"]),
    ("probs", ["pp=2", "schedule=interleaved_1f1b"]),
    ("probs", []),
]


@pytest.mark.parametrize(("drop", "settings"), sampled(MESHES, 3))
def test_the_same_tokens_are_dropped_on_every_mesh(tmp_path, drop, settings):
    """Also with `ep = 1`, in stages, and where blocks are computed again."""
    verdict, findings = simulated(MODEL, plan(tmp_path, drop), settings, world=16)
    assert (verdict.verdict, [d for d in findings if d.severity != "info"]) == ("proved", [])
    assert verdict.outcome.worst < 1e-5


def of_local_experts(tokens, chosen, experts, capacity):
    """As many slots as if the experts of a rank were all, on every rank."""
    alone = threading.current_thread() is threading.main_thread()
    return slots_of(tokens, chosen, experts // (1 if alone else 2), capacity)


def of_own_part(self, choices, scores, tokens):
    """The slots of a rank's own tokens."""
    return self.of_rows(choices, scores, tokens)


slots_of = expert_capacity.slots_of
FAULTS = {
    "slots of the experts of a rank": ("slots_of", of_local_experts, ["ep=2"]),
    "slots of a part of the row": ("Capacity.of_parts", of_own_part, ["cp=2", "ep=2"]),
    "an order of ranks": (
        "order_of",
        lambda part, ranks, _: order_of(part, ranks, "none"),
        ["cp=2"],
    ),
    "rows that a checkpoint does not know": ("carry_facts", lambda _: None, ["ep=2"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_of_limits_are_found(uncached, tmp_path, fault):
    name, wrong, settings = FAULTS[fault]
    with mock.patch(f"planc.runtime.standalone.expert_capacity.{name}", wrong):
        verdict, findings = simulated(MODEL, plan(tmp_path, "position"), settings, world=8)
    assert verdict.verdict == "refuted"
    assert "error" in {d.severity for d in findings}


# The plan ----------------------------------------------------------------------------------------


def test_what_is_gathered_and_estimated(tmp_path):
    path = plan(tmp_path)
    lowered = planc.lower(MODEL, path, world_size=16, overrides=["cp=2", "ep=4"])
    [op] = [op for op in lowered.ops if isinstance(op, LimitExperts)]
    assert (op.axis, op.balance, op.sent, op.experts) == ("cp", "head_tail", True, 128)
    alone = planc.lower(MODEL, path, world_size=16)
    [op] = [op for op in alone.ops if isinstance(op, LimitExperts)]
    assert (op.axis, op.sent) == (None, False)
    assert alone.experts is None


def test_a_capacity_bounds_an_imbalance(tmp_path):
    from planc.ir.experts import fullest

    settings = ["ep=4"]
    limited = compiled_of(MODEL, plan(tmp_path), settings, 16).plan
    free = compiled_of(MODEL, "qwen3_moe", settings, 16).plan
    assert (fullest(limited, 3.0), fullest(free, 3.0), fullest(limited, 1.0)) == (1.25, 3.0, 1.0)
