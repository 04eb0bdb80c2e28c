"""Lengths that sequence parallelism does not divide have the right numbers: none is refused."""

from types import SimpleNamespace

import pytest
from helpers import sampled, simulated

from planc.trial import batches

LENGTH = 15
CASES = [("llama-3.1-8b", "llama", 2), ("mixtral-8x7b", "mixtral", 4), ("gpt2", "gpt2", 4)]


@pytest.mark.parametrize(("model", "plan", "tp"), sampled(CASES, 2))
def test_the_last_ranks_have_fewer_tokens(model, plan, tp, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    lengths = set()

    def seen(text):
        lengths.add(text.shape[1])
        return real(text)

    real = batches.valid_labels
    monkeypatch.setattr(batches, "valid_labels", seen)
    monkeypatch.setattr(batches, "math", SimpleNamespace(lcm=lambda *_: LENGTH))
    verdict, found = simulated(model, plan, (f"tp={tp}",), world=tp)
    assert verdict.verdict == "proved", [d.message for d in found]
    assert lengths == {LENGTH}
