"""The fixture `planc_audit`, in a test of a model's own folder."""

import pytest

pytest_plugins = ["pytester"]

TEST = """
from transformers import {name}Config, {name}ForCausalLM

def test_plans(planc_audit):
    config = {name}Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    verdicts = planc_audit({name}ForCausalLM, config, ["tp_plan"])
    assert [v.verdict for v in verdicts] == ["proved"]
"""


@pytest.mark.parametrize(("name", "passed"), [("Llama", 1), ("Apertus", 0)])
def test_a_plan_of_a_class(name, passed, pytester):
    pytester.makeconftest('pytest_plugins = ["planc.integrations.pytest_audit"]')
    pytester.makepyfile(TEST.format(name=name))
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=passed, failed=1 - passed)
    if not passed:
        result.stdout.fnmatch_lines(["*PL764*", "*act_fn.alpha*", "*configuration_apertus.py*"])
