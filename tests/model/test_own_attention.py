"""Attention of one's own: fused projections by `parts`, head counts by the names that it has."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planc
from planc.model.module_table import facts_of

WIDTH, HEADS, GROUPS = 32, 8, 4


class Seer(nn.Module):
    """One projection for queries, keys and values, and heads counted under names of its own."""

    def __init__(self, place):
        super().__init__()
        self.place, self.causal, self._calls = place, True, 7
        self.n_q, self.n_kv, self.per_head = HEADS, GROUPS, WIDTH // HEADS
        self.mix = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * self.per_head, bias=False)
        self.merge = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        own, shared = self.n_q * self.per_head, self.n_kv * self.per_head
        parts = self.mix(x).split([own, shared, shared], -1)
        heads = [part.unflatten(-1, (-1, self.per_head)).transpose(1, 2) for part in parts]
        heads = [h.repeat_interleave(self.n_q // h.shape[1], 1) for h in heads]
        seen = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return self.merge(seen.transpose(1, 2).reshape(*x.shape[:2], own))


class Floor(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.norm, self.seer = nn.LayerNorm(WIDTH), Seer(place)

    def forward(self, x):
        return x + self.seer(self.norm(x))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.floors = nn.ModuleList(Floor(place) for place in range(3, 6))
        self.out = nn.Linear(WIDTH, 50)

    def forward(self, tokens):
        x = self.words(tokens)
        for floor in self.floors:
            x = floor(x)
        return self.out(x)


PLAN = """
plan own for Tower

mesh {
    dp_shard = auto
    tp       = 2
}

tensor on tp {
    floors.* {
        seer       : attributes(n_q = split, n_kv = split)
        seer.mix   : colwise(parts = [32, 16, 16])
        seer.merge : rowwise
    }
}

fsdp on dp_shard {
    floors.* : unit
    root     : unit
}
"""


def found(tmp_path, text, **sizes):
    (tmp_path / "own.plan").write_text(text)
    torch.manual_seed(0)
    return planc.check(Tower(), tmp_path / "own.plan", world_size=8, overrides=sizes)


@pytest.mark.parametrize("tp", [2, 4])
def test_named_head_counts_are_split_and_proved(tmp_path, tp):
    findings = found(tmp_path, PLAN, tp=tp)
    assert {d.code for d in findings} <= {"PL204"}


def test_a_plan_without_them_is_refuted(tmp_path):
    findings = found(tmp_path, PLAN.replace(", n_kv = split", ""), tp=2)
    assert "PL503" in {d.code for d in findings}


def test_a_misspelled_or_indivisible_one_is_named(tmp_path):
    (wrong,) = [
        d for d in found(tmp_path, PLAN.replace("n_kv", "n_kvv"), tp=2) if d.severity == "error"
    ]
    assert wrong.code == "PL677" and wrong.help == "did you mean `n_kv`?"
    assert wrong.facts[1] == "it is a Seer, which has `n_q` = 8, `n_kv` = 4 and `per_head` = 4"
    (wrong,) = [d for d in found(tmp_path, PLAN, tp=8) if d.severity == "error"]
    assert wrong.code == "PL678" and "n_kv = 4" in wrong.message


def test_an_integer_that_differs_by_layer_keeps_layers_alike():
    floors = facts_of(Tower()).root.children[1].module
    (only,) = floors.children
    assert len(only.indices) == 3
    seer = next(child.module for child in only.module.children if child.name == "seer")
    assert dict(seer.facts) == {"n_q": 8, "n_kv": 4, "per_head": 4}
