"""Blocks in an nn.ModuleDict, as torchtitan's models have them, are a list of blocks everywhere."""

import json

import pytest
import torch
from helpers import slow
from test_script import kinds, ruff, same_as_applied, written
from titan_model import Transformer
from torch import nn

import planc
from planc.cli import main
from planc.diagnostics.diagnostic import Sink
from planc.model.module_table import facts_of
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.document import dumps, loads
from planc.ops.fsdp import FullyShard
from planc.ops.styles import style_text

PLAN = """plan titan for Transformer

let block = layers.*

mesh {
    pp       = 1
    dp_shard = auto
    tp       = 1
}

pipeline on pp {
    microbatches = 2
    stages       = even($block)
}

tensor on tp {
    $block {
        attention.{wq,wk,wv} : colwise
        attention.wo         : rowwise
        feed_forward.{w1,w3} : colwise
        feed_forward.w2      : rowwise
    }
}

checkpoint {
    $block : full
}

fsdp on dp_shard {
    $block : unit(reshard = except_last)
    root   : unit
}
"""


def planned(folder, old="", new=""):
    path = folder / "titan.plan"
    path.write_text(PLAN.replace(old, new) if old else PLAN)
    return str(path)


def wrong(found):
    return {d.code: d for d in found if d.severity != "info"}


@pytest.mark.parametrize("overrides", [slow(["tp=2"]), ["pp=2", "tp=2"]], ids=["tensor", "stages"])
def test_a_plan_is_proved_and_a_broken_one_refuted(tmp_path, overrides):
    with torch.device("cpu"):
        model = Transformer()
    check = {"world_size": 8, "overrides": overrides}
    assert wrong(planc.check(model, planned(tmp_path), **check)) == {}
    broken = planned(tmp_path, "feed_forward.w2      : rowwise", "feed_forward.w2 : replicate")
    found = wrong(planc.check(model, broken, **check))
    assert {"PL501", "PL503"} & {*found}, found


def test_init_finds_the_blocks(tmp_path, capsys):
    path = tmp_path / "my.plan"
    assert main(["init", "titan_model:Transformer", "--allow-code", "-o", str(path)]) == 0
    assert capsys.readouterr().err == ""
    text = " ".join(path.read_text().split())
    assert "layout flow proved it" in text and 'extend "blocks.plan"' in text
    assert "$blocks { attention.{wq,wk,wv} : colwise feed_forward.{w1,w3} : colwise" in text
    lowered = planc.lower(Transformer(), str(path), world_size=8, overrides=["tp=2"])
    styles = {str(o.modules): style_text(o.style) for o in lowered.ops if hasattr(o, "style")}
    assert styles["layers[0:3].attention.wq"] == "colwise"
    assert styles["layers[0:3].feed_forward.w2"] == "rowwise(-> shard(1), local = false)"
    assert styles["layers[0:3].attention_norm"] == "sequence"
    assert [str(o.modules) for o in lowered.ops if isinstance(o, Checkpoint)] == ["layers[0:3]"]
    units = {str(m): o.reshard for o in lowered.ops if isinstance(o, FullyShard) for m in o.members}
    assert {m: kept for m, kept in units.items() if m.startswith("layers")} == {
        "layers[0:2]": True,
        "layers[2]": False,
    }


def test_selectors_stages_and_units_are_those_of_a_list(tmp_path):
    model = Transformer(layers=4)
    plan = planned(tmp_path, "$block : full", "layers[-1] : full")
    lowered = planc.lower(model, plan, world_size=8, overrides=["pp=2", "tp=2"])
    assert lowered.layers == 4 and lowered.module_dicts == ("layers",)
    assert [stage(ops, "layers[3]") for ops in lowered.stages] == [False, True]
    assert [stage(ops, "layers[0]") for ops in lowered.stages] == [True, False]
    again = loads(dumps(lowered), "lowered", Sink())
    assert again == lowered and json.loads(dumps(lowered))["module_dicts"] == ["layers"]


def stage(of, name):
    """Whether a stage of the pipeline has an FSDP unit of this name."""
    units = (op for op in of.ops if type(op).__name__ == "FullyShard")
    return any(m.has(name.replace("[", ".").rstrip("]")) for op in units for m in op.members)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)


class Nested(nn.Module):
    """Lists in dicts, dicts in lists, dicts that are no lists."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Inner() for i in range(4)})
        self.rows = nn.ModuleList([self.experts() for _ in range(2)])
        self.table = nn.ModuleDict({str(i): nn.ModuleList([Inner()] * 1) for i in range(2)})
        self.named = nn.ModuleDict({"1": Inner(), "2": Inner()})

    @staticmethod
    def experts():
        return nn.ModuleDict({str(i): Inner() for i in range(3)})


NESTED = """plan nested for Nested
mesh {
    fsdp = 2
    model = 2
}
tensor on model {
    layers.*.up : colwise
    layers.*.down : rowwise
    rows.*[1:3].up : colwise
    rows.*[1:3].down : rowwise
    table[1][0].up : colwise
    table[1][0].down : rowwise
    named.*.up : colwise
    named.*.down : rowwise
}
checkpoint {
    layers.* : full
    rows.*.* : full
    named.* : full
}
fsdp on fsdp {
    layers[:-1] : unit
    layers[-1] : unit(reshard = never)
    group(rows[0][0:2], table[0][0]) : unit
    rows[1].* : unit
    root : unit
}
"""


def test_emitted_python_does_what_apply_does(tmp_path):
    path = tmp_path / "nested.plan"
    path.write_text(NESTED)
    with torch.device("meta"):
        one, two = Nested(), Nested()
    lowered = planc.lower(one, str(path), world_size=4)
    assert lowered.module_dicts == ("layers", "rows.*", "table")
    source = written(lowered)
    assert "in model.layers.values():" in source and "in model.layers.items():" in source
    assert "model.rows[i][str(j)]" in source and 'model.layers["3"]' in source
    same_as_applied(source, lowered, one, two)
    assert "CheckpointWrapper" in {kind for kind, _, _ in kinds(two)[1].values()}
    assert ruff(source, "format", "--diff").returncode == 0


@pytest.mark.parametrize("keys", [["1", "2"], ["0", "2"], ["0", "01"], ["1", "0"], ["a", "b"], []])
def test_other_dicts_are_no_lists(keys):
    found = facts_of(nn.ModuleDict({key: Inner() for key in keys}))
    assert found.root.kind == "dict" and [c.name for c in found.root.children] == keys
