"""The assumptions that estimates and suggestions name."""

from planc.cli import main
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load
from planc.tools.estimate.answer import Request, answer_for, model_assumptions, text
from planc.tools.estimate.from_plan import Batch


def test_rows_longer_than_the_positions_of_a_model():
    facts = load("llama-3.1-8b", Sink())
    assert not [*model_assumptions(facts, 131072)]
    assert [*model_assumptions(facts, 131073)] == [
        "rows of 131,073 tokens, more than the 131,072 positions of the model"
    ]


def assumed(*settings, imbalance=1.0):
    compiled = compile_plan("qwen3-30b-a3b", "qwen3_moe", Sink(), world_size=8, settings=settings)
    batch = Batch(global_batch=8, sequence=512, imbalance=imbalance)
    return [*text(answer_for(compiled, Request(batch=batch), Sink()))][1]


def test_equal_shares_of_experts_are_named():
    equal = "equal shares of tokens for all experts"
    assert equal in assumed("ep=8")
    assert equal not in assumed()
    uneven = assumed("ep=8", imbalance=1.3)
    assert equal not in uneven and "get 1.3 times the mean of tokens" in uneven


def test_a_suggestion_for_a_multimodal_model_says_that_images_are_not_counted(capsys):
    asked = ["suggest", "qwen3-vl-8b", "--world-size", "8", "--batch", "8", "--seq", "512"]
    main([*asked, "--no-run", "--set", "tp=1"])
    report = "".join(capsys.readouterr())
    assert "\ncounted with eager kernels; text alone: images or sound" in report


def test_the_option_has_the_name_of_what_is_uneven(capsys):
    asked = ["estimate", "qwen3-30b-a3b", "qwen3_moe", "--world-size", "8", "--set", "ep=8"]
    main([*asked, "--batch", "8", "--seq", "512", "--expert-imbalance", "1.3"])
    assert "get 1.3 times the mean of tokens" in capsys.readouterr().out
