"""What `planc why` says that a rank keeps, and what torch leaves on it."""

import pytest

pytestmark = pytest.mark.slow

CASES = [
    ("llama", "llama", ["tp=2"]),
    ("llama", "llama", ["tp=2", "dp_replicate=2"]),
    ("gpt2", "gpt2", []),
    ("gpt_neox", "gpt_neox", ["tp=2"]),
]


@pytest.mark.parametrize(("family", "plan", "overrides"), CASES)
def test_shapes_and_bytes(four, family, plan, overrides):
    """Of rank 0, which holds most; the names are torch's, with those of the wrappers in them."""
    found = four.run("why_jobs.shapes", family=family, plan=plan, overrides=overrides)[0]
    assert len(found) > 10 and any("_checkpoint_wrapped_module" in name for name, *_ in found)
    for name, said, shape, nbytes, real in found:
        assert (said, nbytes) == (shape, real), name
