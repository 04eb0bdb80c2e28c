"""Rows of published tables beside the estimate; `make estimate` has all of them."""

from statistics import median

import pytest
from published_rows import LEFT_OUT
from published_tables import error as relative_error
from published_tables import estimated, every_row, p90

from planc.tools.estimate.memory import GIB

ROWS = every_row()


def row_of(**fields):
    [row] = [r for r in ROWS if all(getattr(r, key) == value for key, value in fields.items())]
    return row


def error(row):
    """The relative error of the tokens a second."""
    return estimated(row).time.tokens_per_second / row.tokens - 1


def test_each_configuration_has_its_newest_release():
    configurations = [row.configuration for row in ROWS]
    assert len({*configurations}) == len(configurations) > 100
    qwen = [row for row in ROWS if row.name == "Qwen3_30B_a3B"]
    assert sorted((row.release, row.settings) for row in qwen) == [
        ("26.02.01", ("pp=2", "ep=8")),
        ("26.06", ("ep=16",)),
    ]


def test_rows_that_are_left_out_are_named():
    assert not [row for row in ROWS if any(name in row.name for name in LEFT_OUT)]


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"name": "qwen3-30b-a3b"}, 0.08),
        ({"name": "LLAMA3_70B", "gpus": 64}, 0.10),
        ({"name": "LLAMA2-70B", "gpus": 64}, 0.10),
        ({"name": "7b", "gpus": 128, "hardware": "h100-8x", "length": 2048}, 0.10),
    ],
    ids=["automodel", "megatron-bridge", "nemo", "llm-foundry"],
)
def test_a_row_of_each_table(fields, bound):
    assert abs(error(row_of(**fields))) < bound


def test_the_decline_of_fsdp_with_nodes():
    """From 16 to 64 nodes, within 4 points of the published one."""
    few, many = (
        row_of(name="7b", gpus=gpus, hardware="h100-8x", length=2048) for gpus in (128, 512)
    )
    declines = [
        rate(many) / rate(few)
        for rate in (
            lambda row: row.tokens,
            lambda row: estimated(row).time.tokens_per_second,
        )
    ]
    assert declines[0] == pytest.approx(declines[1], abs=0.04)


FULL = ("30b", 8, 8192)
"""The run of llm-foundry that fills the memory of its accelerators: the one beyond 30 %."""


@pytest.mark.slow
def test_the_goals():
    """Of dense models and of those with experts; runs fit but for two, which are named."""
    pairs = [(row, estimated(row)) for row in ROWS if row.judged]
    errors = {"dense": [], "experts": []}
    for row, made in pairs:
        if (row.name, row.gpus, row.length) != FULL or row.hardware != "h100-8x":
            errors[row.kind.partition(",")[0]].append(abs(relative_error(row, made)))
    for kind, (half, most, worst) in {
        "dense": (0.08, 0.15, 0.30),
        "experts": (0.15, 0.30, 0.40),
    }.items():
        found = errors[kind]
        assert (median(found) < half, p90(found) < most, max(found) < worst) == (True,) * 3, kind
    large = {row.name for row, made in pairs if made.fullest.peak / GIB > row.capacity}
    assert large == {"Nemotron-340B", "LLAMA2-70B"} and len(pairs) >= 150
