"""A fixed sample of `make coverage`: init, check, four processes, for ten families without a plan."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "coverage"))

from run import LIMIT, row

SAMPLE = [
    "arcee",
    "bert",
    "deepseek_v3",
    "gemma3",
    "gpt_oss",
    "jamba",
    "nemotron_h",
    "phimoe",
    "qwen3_next",
    "whisper",
]


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_is_planned_and_proved(family, four, tmp_path):
    found = row(family, four, tmp_path, plans={})
    assert (found["verdict"], found["reason"], found["flow"]) == ("proved", "", "proved")
    assert 0 < max(found["errors"].values()) and found["errors"]["gradient"] < LIMIT
    assert found["share"] > 0.5
