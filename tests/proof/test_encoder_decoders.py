"""Encoders with decoders on other axes: what docs/library.md says of each, cell by cell."""

import json
import re

import pytest
import transformers
from folders import ROOT

import planc

PAGE = ROOT / "docs" / "library.md"
SIZES = {
    "bart": {
        "d_model": 64,
        **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")},
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "dropout": 0.0,
    },
    "t5": {
        "d_model": 64,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 16,
        "d_ff": 128,
        "vocab_size": 256,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
    },
}
SIZES["whisper"] = {
    **SIZES["bart"],
    "max_source_positions": 100,
    "max_target_positions": 64,
    "num_mel_bins": 16,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
BART = """    model.{encoder,decoder}.layers.* {
        fc1 : colwise
        fc2 : rowwise
    }
"""
RULES = {
    "bart": BART,
    "t5": """    {encoder,decoder}.block.*.layer.*.DenseReluDense {
        wi : colwise
        wo : rowwise
    }
""",
    "whisper": BART,
}
SETTINGS = (("tp=2", "sequence=true"), ("cp=2",), ("pp=2", "microbatches=2"))


def cells():
    """The family, the column and the text of each cell of the page's table."""
    section = PAGE.read_text().partition("## Encoders with decoders")[2]
    for line in re.findall(r"^\| (\w+) \| (.+) \|$", section, re.M):
        family, texts = line
        if family in SIZES:
            yield from ((family, at, text) for at, text in enumerate(texts.split(" | ")))


def test_the_page_has_all_cells():
    assert [(family, at) for family, at, _ in cells()] == [
        (f, at) for f in SIZES for at in range(3)
    ]


@pytest.mark.parametrize(("family", "at", "said"), cells())
def test_what_the_page_says_of_encoders_with_decoders(tmp_path, family, at, said):
    names = {"bart": "Bart", "t5": "T5", "whisper": "Whisper"}
    config = getattr(transformers, f"{names[family]}Config")(**SIZES[family]).to_dict()
    config["architectures"] = [f"{names[family]}ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = tmp_path / "own.plan"
    text = f'plan own for {family}\nextend "blocks.plan"\ntensor on tp {{\n{RULES[family]}}}\n'
    plan.write_text(text)
    settings = SETTINGS[at]
    found = planc.check(str(tmp_path), str(plan), world_size=4, overrides=list(settings))
    errors = [d for d in found if d.severity in ("error", "warning")]
    if said == "proved":
        assert not errors, errors[0].message
        return
    (error,) = errors
    assert said == f"[{error.code}](diagnostics/{error.code}.md)"
    # the reason, and the line of the plan that asks for what there is not
    reason = {"PL526": "by its token ids"}.get(error.code, "is an encoder with a decoder")
    assert reason in " ".join((error.message, *error.facts))
    line = error.labels[0].span.text
    assert line.startswith(("sequence =", "attention =", "stages =")[at])
