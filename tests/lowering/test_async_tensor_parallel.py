"""Asynchronous tensor parallelism: lowered as calls; refused where torch has nothing to overlap."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch._inductor.config
from helpers import codes, judged, lowered
from torch.distributed import _symmetric_memory

from planc.emit.python.script import render
from planc.runtime.standalone.tensor_styles import enable_async_tp
from planc.sections.compile.ops import Compile

PLAN = """plan t for llama
mesh {
    dp_shard = auto
    tp       = 2
}
tensor on tp {
    model.layers.* {
        {input,post_attention}_layernorm : sequence
        mlp                              : input(shard(1) -> replicate)
        mlp.{gate,up}_proj               : colwise
        mlp.down_proj                    : rowwise(-> shard(1), local = false)
        self_attn                        : input(hidden_states = shard(1) -> replicate)
        self_attn.{q,k,v}_proj           : colwise
        self_attn.o_proj                 : rowwise(-> shard(1), local = false)
    }
    model.embed_tokens : rowwise(-> shard(1), local = false)
    model.norm         : sequence
    lm_head            : colwise(shard(1) -> replicate)
}
compile {
    model.layers.* : block(async_tp = true)
}
fsdp on dp_shard {
    root : unit
}
"""


def test_it_is_lowered_for_the_tensor_axis():
    plan = lowered(PLAN)
    [op] = [o for o in plan.ops if isinstance(o, Compile)]
    assert op.async_tp == ("tp",)
    source = render(plan, digest="0" * 64)
    enabled = source.index('    enable_async_tp(mesh["tp"])')
    assert enabled < source.index("block.compile()")
    assert "_micro_pipeline_tp = True" in source


def test_with_one_rank_there_is_nothing_to_overlap():
    [op] = [o for o in lowered(PLAN, settings=["tp=1"]).ops if isinstance(o, Compile)]
    assert op.async_tp == ()


@pytest.mark.parametrize(
    "changes",
    [
        [("shard(1) -> replicate", "replicate -> replicate"), ("(-> shard(1), local = false)", "")],
    ],
)
def test_all_reduces_are_refused(changes):
    text = PLAN
    for old, new in changes:
        text = text.replace(old, new)
    assert "PL436" in codes(judged(text)[2])


def test_the_cpu_is_refused():
    with pytest.raises(ValueError, match="needs CUDA"):
        enable_async_tp(SimpleNamespace(device_type="cpu"))
    assert torch._inductor.config._micro_pipeline_tp is False


def test_what_it_sets():
    """The two settings alone; no GPU has run them here."""
    group = SimpleNamespace(group_name="7")
    mesh = SimpleNamespace(device_type="cuda", get_group=lambda: group)
    with (
        torch._inductor.config.patch(_micro_pipeline_tp=False),
        mock.patch.object(_symmetric_memory, "enable_symm_mem_for_group") as enable,
    ):
        enable_async_tp(mesh)
        assert torch._inductor.config._micro_pipeline_tp is True
    enable.assert_called_once_with("7")
