"""The estimates beside the peaks that were measured on gloo processes (gloo_peaks.py)."""

import json
from statistics import median

import gloo_peaks
import pytest
from gloo_combinations import COMBINATIONS

PEAKS = json.loads(gloo_peaks.PEAKS.read_text())
SAMPLE = [*PEAKS][::8]
SPLIT = tuple(f"llama, pp 2, {name}" for name in ("zero_bubble", "zbv", "dualpipe_v"))
"""Checkpointed blocks under a schedule that computes gradients of weights later: torch recomputes a
block for each of them and keeps most of it, which is not modeled."""
INTERLEAVED = "llama, pp 2, interleaved_1f1b"
"""With checkpoints it is up to 7 % too low, and why is not known."""


def test_what_was_measured_is_a_combination():
    assert set(PEAKS) <= set(COMBINATIONS)
    for name, places in PEAKS.items():
        assert sum(map(len, places)) == gloo_peaks.RANKS, name


def test_a_sample_of_peaks():
    some = {n: PEAKS[n] for n in SAMPLE if n not in (*SPLIT, INTERLEAVED)}
    for name, *_, error in gloo_peaks.errors(some):
        assert abs(error) < 0.05, name


@pytest.mark.slow
def test_every_peak():
    found = [(abs(error), name) for name, *_, error in gloo_peaks.errors(PEAKS)]
    assert median(error for error, _ in found) < 0.02
    worse = {name.partition(", stage")[0] for size, name in found if size >= 0.05}
    assert worse == {*SPLIT, INTERLEAVED}


def test_what_frozen_weights_do_not_keep():
    """Measured with and without adapters; the sample above may have neither."""
    for name in ("llama, no checkpoints", "llama, lora"):
        [(_, _, _, error)] = gloo_peaks.errors({name: PEAKS[name]})
        assert abs(error) < 0.03, name
