"""Fields of TRL's configurations under a plan, beside TRL's trainers in one process."""

import dataclasses
import re

import pytest
import torch
import trl
import trl_jobs
from folders import ROOT
from transformers import TrainingArguments

PAGE = ROOT / "docs" / "trainer.md"
CONFIGURATIONS = ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")
UNLOGGED = re.compile(r"runtime|per_second|^epoch$|^step$|step_time|total_flos|learning_rate")
OF_PASSES = re.compile(r"^logits/|entropy|accuracy")
"""Metrics whose mean over passes is not that of all their tokens."""
OF_PAIRS = (
    *("sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero"),
    *("apo_down", "discopop", "sigmoid_norm"),
)
"""The losses of DPO that are a mean over pairs."""
ENTROPY = {"use_adaptive_entropy": True, "entropy_coef_max": 0.35, "lengths": (6, 6)}
REFERENCE = {"reference": True}
COMPARED = [
    ("SFT", {"loss_type": "dft", "max_length": 12, "shuffle_dataset": True}),
    ("SFT", {"completion_only_loss": False, "pad_to_multiple_of": 8}),
    ("SFT", {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2}),
    ("SFT", {"packing": True, "max_length": 32}),
    ("SFT", {"packing": True, "packing_strategy": "wrapped", "max_length": 24}),
    ("SFT", {"padding_free": True, "max_length": None}),
    ("SFT", {"pad_token": "<unk>", "eos_token": "w0"}),
    ("SFT", {"max_length": 6, "truncation_mode": "keep_end", "dataset_num_proc": 2}),
    ("DPO", {"loss_type": [*OF_PAIRS], "label_smoothing": 0.1, "discopop_tau": 0.1, "beta": 0.5}),
    ("DPO", {"loss_type": ["ipo", "sigmoid"], "loss_weights": [0.2, 1.0], "use_weighting": True}),
    ("DPO", {"f_divergence_type": "js_divergence", "ld_alpha": 0.5, "max_length": 12}),
    ("DPO", {"f_divergence_type": "alpha_divergence", "gradient_accumulation_steps": 2}),
    ("DPO", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.8}),
    ("DPO", {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 4, **REFERENCE}),
    ("KTO", {"loss_type": "apo_zero_unpaired", "desirable_weight": 2.0, "beta": 0.5}),
    ("KTO", {"loss_type": "apo_zero_unpaired", "undesirable_weight": 0.5, "max_length": 12}),
    ("Reward", {"center_rewards_coefficient": 0.1, "max_length": 12, "pad_to_multiple_of": 8}),
    ("GRPO", {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True}),
    ("GRPO", {"loss_type": "dr_grpo", "scale_rewards": "batch", "reward_weights": [1.0, 0.5]}),
    ("GRPO", {"loss_type": "cispo", "epsilon_high": 0.3, "num_iterations": 2}),
    ("GRPO", {"loss_type": "sapo", "sapo_temperature_neg": 1.2, "scale_rewards": "none"}),
    ("GRPO", {"loss_type": "vespo", "vespo_k_pos": 1.5, "mask_truncated_completions": True}),
    ("GRPO", {"loss_type": "luspo", "importance_sampling_level": "sequence", "delta": 4.0}),
    ("GRPO", {"top_entropy_quantile": 0.5, "multi_objective_aggregation": "normalize_then_sum"}),
    ("GRPO", {"loss_type": "bnpo", "entropy_coef": 0.1, "lengths": (6, 6)}),
    ("GRPO", {"use_adaptive_entropy": True, "entropy_target": 2.0, "lengths": (6, 6)}),
    ("GRPO", {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "temperature": 0.8}),
    ("GRPO", {"loss_type": "vespo", "vespo_k_neg": 2.0, "vespo_lambda_pos": 2.0}),
    ("GRPO", {"loss_type": "vespo", "vespo_lambda_neg": 1.0, "num_iterations": 2}),
    ("GRPO", {"off_policy_mask_threshold": 1e-4, "num_iterations": 2, "epsilon": 1e-3}),
    ("GRPO", {**ENTROPY, "entropy_coef": 0.3, "entropy_coef_delta": 0.1, "entropy_target": 5.0}),
    ("GRPO", {**ENTROPY, "entropy_coef": 0.1, "entropy_coef_min": 0.1, "entropy_target": 0.1}),
    ("RLOO", {"beta": 0.1, "normalize_advantages": True, "reward_clip_range": (-1.0, 1.0)}),
    ("RLOO", {"num_iterations": 2, "epsilon": 0.1, "reward_weights": [1.0, 0.5]}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return trl_jobs.write_models(tmp_path_factory.mktemp("models"))


def compared(four, models, kind, fields, alone):
    """Asserts that a run on four processes logs what one process does, and gives its weights."""
    draws = kind in ("GRPO", "RLOO")
    folder = models["classifier" if kind == "Reward" else "llama"]
    plan = "classifier" if kind == "Reward" else "llama"
    mesh = ("dp_replicate=2",) if draws else ("tp=2", "sequence=false")
    given = {"batch": 2 if draws else 4, "plan": plan, "overrides": mesh, **fields}
    log, weights = trl_jobs.trained(kind, folder, **{"batch": 8, **fields, **alone})
    for mine, tensors in four.run("trl_jobs.trained", kind=kind, folder=folder, **given):
        assert len(mine) == len(log) == 2
        for found, right in zip(mine, log, strict=True):
            wanted = {name: value for name, value in right.items() if not UNLOGGED.search(name)}
            if abs(right.get("rewards/margins", 1.0)) < 1e-6:  # the model is its reference
                wanted.pop("rewards/accuracies", None)  # the signs of rounding
            if alone:
                wanted = {n: v for n, v in wanted.items() if not OF_PASSES.search(n)}
            assert {n: found[n] for n in wanted} == pytest.approx(wanted, rel=2e-3, abs=2e-4)
        for name, value in weights.items():
            torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("kind", "fields"), COMPARED)
@pytest.mark.slow
def test_loss_and_metrics_are_those_of_one_process(four, models, kind, fields):
    compared(four, models, kind, fields, {})


@pytest.mark.parametrize("losses", [["sigmoid", "sft"], ["aot", "aot_unpaired"]])
@pytest.mark.slow
def test_a_loss_of_the_rows_of_a_rank_is_that_of_as_many_passes(four, models, losses):
    """Two data ranks with 4 rows each are two passes of 4 rows in one process: the loss is a mean
    over the tokens of these rows, or sorts them.
    """
    alone = {"batch": 4, "gradient_accumulation_steps": 2}
    compared(four, models, "DPO", {"loss_type": losses}, alone)


def own_fields():
    """The fields of TRL's configurations that `TrainingArguments` does not have."""
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    every = (getattr(trl, f"{kind}Config") for kind in CONFIGURATIONS)
    return {field.name for one in every for field in dataclasses.fields(one)} - known


def test_the_page_has_each_field_once():
    table = re.search(r"\| fields of TRL \| under a plan \|\n(.*?)\n\n", PAGE.read_text(), re.S)[1]
    cells = [line.split(" | ") for line in table.splitlines()[1:]]
    names = [(name, row[1]) for row in cells for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(name for name, _ in names) == sorted(own_fields())
    refused = {name for name, text in names if text.startswith("refused")}
    assert refused == {*REFUSED}


WITHOUT_NUMBERS = {
    *("dataset_text_field", "dataset_kwargs", "eval_packing", "assistant_only_loss"),  # of rows
    *("chat_template_kwargs", "model_init_kwargs", "trust_remote_code", "disable_dropout"),
    *("max_completion_length", "top_p", "top_k", "min_p", "repetition_penalty"),  # of draws
    *("generation_kwargs", "cache_implementation", "max_tool_calling_iterations"),
}
"""Fields that the page calls right without a run of their own: they choose the rows that all ranks
read, what is drawn, or how a model is loaded.
"""


def test_each_field_that_is_right_is_compared():
    table = re.search(r"\| fields of TRL \| under a plan \|\n(.*?)\n\n", PAGE.read_text(), re.S)[1]
    cells = [line.split(" | ") for line in table.splitlines()[1:]]
    right = {
        n for row in cells if row[1].startswith("right") for n in re.findall(r"`(\w+)`", row[0])
    }
    compared = {name for _, fields in COMPARED for name in fields}
    assert right - compared == WITHOUT_NUMBERS


REFUSED = {
    "activation_offloading": ("DPO", True),
    "use_vllm": ("GRPO", True),
    "sync_ref_model": ("DPO", True),
    "cast_lm_head_to_fp32": ("GRPO", True),
    "chat_template_path": ("SFT", "another/model"),
    "use_transformers_continuous_batching": ("GRPO", True),
    "use_transformers_paged": ("GRPO", True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_a_plan_rules_out_is_refused_by_name(tmp_path, name):
    from planc.integrations import trainer

    kind, value = REFUSED[name]
    arguments = getattr(trl, f"{kind}Config")(str(tmp_path), use_cpu=True, **trl_jobs.OFF)
    trainer._require_undecided(arguments, {})
    setattr(arguments, name, value)
    with pytest.raises(ValueError, match=name):
        trainer._require_undecided(arguments, {})
