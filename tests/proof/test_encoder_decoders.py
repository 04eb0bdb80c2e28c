"""Encoders with decoders on other axes are proved or refused, as docs/library.md says."""

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
SETTINGS = {
    ("tp=2", "sequence=true"): ("sequence =", (None, None, "PL526")),
    ("cp=2",): ("attention =", ("PL541", "PL541", "PL541")),
    ("pp=2", "microbatches=2"): ("stages =", ("PL566", "PL566", "PL566")),
}
"""By settings, the line of the plan that asks for the axis, and the code that refuses bart, t5 and
whisper; None if they are proved.
"""


CASES = [
    (family, settings, line, code)
    for settings, (line, codes) in SETTINGS.items()
    for family, code in zip(SIZES, codes, strict=True)
]


def test_the_page_links_each_refusal():
    section = PAGE.read_text().partition("## Encoders with decoders")[2].partition("\n###")[0]
    assert {*re.findall(r"\[(PL\d+)\]", section)} == {code for *_, code in CASES if code}


@pytest.mark.parametrize(("family", "settings", "line", "code"), CASES)
def test_what_the_page_says_of_encoders_with_decoders(tmp_path, family, settings, line, code):
    names = {"bart": "Bart", "t5": "T5", "whisper": "Whisper"}
    config = getattr(transformers, f"{names[family]}Config")(**SIZES[family]).to_dict()
    config["architectures"] = [f"{names[family]}ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = tmp_path / "own.plan"
    text = f'plan own for {family}\nextend "blocks.plan"\ntensor on tp {{\n{RULES[family]}}}\n'
    plan.write_text(text)
    findings = planc.check(str(tmp_path), str(plan), world_size=4, overrides=list(settings))
    errors = [d for d in findings if d.severity in ("error", "warning")]
    assert [error.code for error in errors] == [code] * (code is not None)
    for error in errors:
        reason = {"PL526": "by its token ids"}.get(error.code, "is an encoder with a decoder")
        assert reason in " ".join((error.message, *error.facts))
        assert error.labels[0].span.text.startswith(line)
