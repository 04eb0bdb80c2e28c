"""A model that predicts a second token, whose table has three holders, in stages."""

import pytest
import torch
from helpers import checked, slow
from one_block import Block
from torch import nn
from torch.nn.functional import cross_entropy

from planc.runtime.standalone import pipeline_step

PLAN = """plan own for Predicting, Shared, Embedded

mesh {
    pp       = 2
    dp_shard = auto
}

pipeline on pp {
    schedule     = SCHEDULE
    microbatches = 2
    stages       = even(blocks.*)
}

fsdp on dp_shard {
    blocks.* : unit
    UNITS
    root     : unit
}
"""
GROUP = "group(table, second.table, head) : unit"


class Second(nn.Module):
    """One more block, of hidden states joined with the next token (DeepSeek-V3, section 2.2)."""

    def __init__(self, table):
        super().__init__()
        if table is not None:
            self.table = nn.Embedding(50, 32)
            self.table.weight = table.weight
        self.join, self.block = nn.Linear(64, 32), Block()

    def forward(self, x, tokens, table):
        found = (table or self.table)(tokens[:, 1:])
        return self.block(self.join(torch.cat([x[:, :-1], found], -1)))


class Predicting(nn.Module):
    own = True

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(32)
        self.second = Second(self.table if self.own else None)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens, targets=None):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x)
        more = self.head(self.second(x, tokens, None if self.own else self.table))
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss + 0.3 * cross_entropy(more.flatten(0, 1), targets[:, 1:].flatten())


class Shared(Predicting):
    """Its second block has no table, and calls that of the first stage."""

    own = False


class Embedded(Predicting):
    """Joins what the table gave in front of the blocks, which the last stage does not have."""

    def __init__(self):
        super().__init__()
        self.join = nn.Bilinear(32, 32, 32)

    def forward(self, tokens, targets=None):
        x = first = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.join(x, first))
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("units", ["", slow(GROUP)], ids=["whole", "group"])
@pytest.mark.parametrize("schedule", ["1f1b", slow("interleaved_1f1b")])
def test_a_second_token_in_stages(schedule, units, tmp_path):
    """On other stages its code meets values that the blocks before have not computed."""
    text = PLAN.replace("SCHEDULE", schedule).replace("UNITS", units)
    assert checked(Predicting(), text, tmp_path) == {}


def test_a_gradient_of_one_holder_alone_is_refuted(tmp_path, monkeypatch, uncached):
    monkeypatch.setattr(pipeline_step, "exchange", lambda *_: None)
    text = PLAN.replace("SCHEDULE", "1f1b").replace("UNITS", "")
    assert "PL502" in checked(Predicting(), text, tmp_path)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Shared, "`table` runs before the last block and after the first one"),
        (Embedded, "behind its blocks `join` takes what modules before them compute"),
    ],
)
def test_what_two_stages_need_is_refused(kind, said, tmp_path):
    text = PLAN.replace("SCHEDULE", "1f1b").replace("UNITS", "")
    found = checked(kind(), text, tmp_path)
    assert list(found) == ["PL566"]
    assert said in found["PL566"].message
