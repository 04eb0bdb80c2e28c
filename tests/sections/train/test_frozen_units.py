"""Frozen parameters in FSDP units, and outside of them."""

from helpers import fsdp, judged, lowered
from test_fsdp import HEAD, MIXED, mixed

from planc.diagnostics.diagnostic import Sink
from planc.emit.python.script import render as script
from planc.emit.text import render as text_of
from planc.ops.document import digest, dumps, loads

FROZEN = "train {\n model.embed_tokens : frozen\n model.layers[0:4] : frozen\n}\n"
IGNORED = HEAD + FROZEN + fsdp("ignore model.embed_tokens", "model.layers.* : unit")


def test_a_frozen_parameter_of_another_dtype_may_be_in_a_unit():
    """It has no gradient that would be reduced."""
    frozen = "train {\n blocks.*.norm : frozen\n}\n"
    assert judged(MIXED + frozen + fsdp("blocks.* : unit"), model=mixed())[2] == []


def test_frozen_and_ignored_modules_are_in_the_document_and_the_digest():
    plan = lowered(IGNORED)
    again = loads(dumps(plan), "x.json", Sink())
    assert again == plan and digest(again) == digest(plan)
    changes = ("ignore model.embed_tokens", " model.layers[0:4] : frozen\n")
    digests = {digest(lowered(IGNORED.replace(change, ""))) for change in changes}
    assert len(digests | {digest(plan)}) == len(changes) + 1


def test_the_text_names_frozen_and_ignored_modules():
    text = text_of(lowered(IGNORED), digest="0" * 64)
    assert "frozen      model.embed_tokens" in text
    assert "ignored     model.embed_tokens  replicated, in no unit" in text


def test_the_script_is_python_without_planc():
    source = script(lowered(IGNORED), digest="0" * 64)
    compile(source, "emitted.py", "exec")
    assert "planc" not in source.partition('"""\n\n')[2].replace("t.plan", "")
