"""The train section, next to what lowering freezes by itself."""

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink

PLAN = """plan norms for llama
extend "llama"
adapters {
    $blocks.self_attn.q_proj : lora(rank = 8)
}
train {
    $blocks.input_layernorm : trainable
}
"""


def test_a_rule_follows_what_is_frozen_again(tmp_path):
    """Sequence parallelism unfreezes norms, which lowering freezes again: the rule comes after."""
    (tmp_path / "norms.plan").write_text(PLAN)
    settings = ["tp=2", "sequence=true"]
    path, sink = str(tmp_path / "norms.plan"), Sink()
    done = compile_plan("llama-3.1-8b", path, sink, world_size=8, settings=settings)
    assert done.lowered is not None and not sink.errors
    norm = "model.layers.0.input_layernorm"
    assert [op.trainable for op in done.lowered.freezes if op.modules.has(norm)] == [False, True]
