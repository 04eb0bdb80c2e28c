"""Syntax: the gallery parses, and every mistake of a file is reported once, at its line."""

from planc.diagnostic import Sink
from planc.source import Source
from planc.syntax import parse, tree

PLAN = """\
plan llama for llama, mistral
let block = model.layers.*

mesh {
    dp_shard = auto
    tp       = 1
}

tensor on tp {
    $block {
        self_attn.{q,k,v}_proj : colwise
        self_attn              : input(hidden_states = shard(1) -> replicate)
        mlp.down_proj          : rowwise(-> shard(1), local = false)
    }
}

fsdp on dp_shard * cp, replicate on dp_replicate {
    precision(param = bf16, reduce = fp32)
    group(model.norm, lm_head) : unit(reshard = never)
}
"""


def read(text):
    sink = Sink()
    return parse(Source("t.plan", text), sink), sink


def test_a_plan_parses_with_spans():
    file, sink = read(PLAN)
    assert list(sink) == []
    header, let, mesh, tensor, fsdp = file.statements
    assert isinstance(header, tree.Header) and [f.path for f in header.families] == [
        "llama",
        "mistral",
    ]
    assert let.value.path == "model.layers.*"
    assert [s.name for s in mesh.items] == ["dp_shard", "tp"]
    rule = tensor.items[0].items[0]
    assert rule.target.path == "self_attn.{q,k,v}_proj" and rule.origin.line == 11
    assert [a.path for a in fsdp.axes] == ["dp_shard", "cp"]


def test_five_errors_give_five_diagnostics():
    text = PLAN.replace("tp       = 1", "tp       = = 1")
    text = text.replace("plan llama for", "plan llama fro")
    text = text.replace("_proj : colwise", "_proj colwise")
    text = text.replace("param = bf16,", "param == bf16 bf16,")
    text = text.replace("fsdp on dp_shard * cp", "fsdp onn dp_shard * cp")
    _, sink = read(text)
    assert [d.labels[0].span.line for d in sink] == [1, 6, 11, 17, 18] or sorted(
        d.labels[0].span.line for d in sink
    ) == [1, 6, 11, 17, 18], [d.message for d in sink]


def test_hopeless_input_is_a_diagnostic():
    for text in ("", "{" * 10_000_000, "(" * 500, "\x00\x01", 'extend "abc', "mesh {\n tp = 1\n"):
        _, sink = read(text)
        assert sink.failed, text[:20]
