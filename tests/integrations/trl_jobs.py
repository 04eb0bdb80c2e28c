"""Runs of TRL's trainers: under a plan on each rank of a pool, or without one."""

import os
import random
from contextlib import ExitStack
from tempfile import TemporaryDirectory

import torch
import trl
from datasets import Dataset, load_from_disk
from torch import distributed
from trainer_jobs import FP32, STEPS, forget_processes
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 3,
}
WORDS = [f"w{i}" for i in range(92)]
OFF = {"bf16": False, "gradient_checkpointing": False, "max_grad_norm": 0.5}
DRAWS = {"max_completion_length": 8, "num_generations": 4, "temperature": 1.0}


def write_models(folder):
    """Writes the weights and the tokenizer of a model of each kind; returns their folders."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "<pad>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **special)
    torch.manual_seed(0)
    llama = LlamaConfig(**SIZES)
    experts = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    made = {
        "llama": LlamaForCausalLM(llama),
        "mixtral": MixtralForCausalLM(experts),
        "classifier": LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        for user in ("plan", "alone"):
            rows("DPO").save_to_disk(folder / name / user)
    return {name: str(folder / name) for name in made}


def rows(kind, count=128):
    """Rows of the trainer of a kind, with texts of different lengths."""
    numbers = random.Random(0)

    def text(least, most):
        return " ".join(numbers.choices(WORDS, k=numbers.randint(least, most)))

    made = [
        {"prompt": text(2, 9), "chosen": f" {text(1, 12)}", "rejected": f" {text(1, 12)}"}
        for _ in range(count)
    ]
    if kind == "SFT":
        made = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in made]
    if kind == "KTO":
        made = [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": bool(i % 3)}
            for i, row in enumerate(made)
        ]
    if kind in ("GRPO", "RLOO"):
        made = [{"prompt": row["prompt"]} for row in made]
    return Dataset.from_list(made)


class FixedCompletions:
    """Completions that follow from the prompt and the row, whatever rank has it; `lengths` are the
    least and the most tokens.
    """

    lengths = (2, 8)

    def _generate_single_turn(self, prompt_ids, *rest, **named):
        first, made = self.accelerator.process_index * len(prompt_ids), []
        for row, ids in enumerate(prompt_ids, first):
            numbers = random.Random(f"{ids} {row % self.num_generations}")
            made.append([*numbers.choices(range(4, 96), k=numbers.randint(*self.lengths)), 2])
        return (made, None) if isinstance(self, trl.GRPOTrainer) else made


def reward(completions, **_):
    return [sum(int(word[1:]) % 7 for word in text.split()) / 10 for text in completions]


def length(completions, **_):
    return [len(text.split()) / 8 for text in completions]


def trained(
    kind, folder, batch, plan=None, overrides=(), lengths=(2, 8), reference=False, **fields
):
    """(logs, weights) of two steps.

    Args:
        kind: of the trainer, such as `DPO`.
        folder: of the model.
        batch: the rows of a data rank in a pass.
        plan: a shipped plan; None for TRL's own trainer.
        lengths: the least and the most tokens of a completion.
        reference: whether a trainer of pairs gets a `ref_model`, the same one.
        fields: of the trainer's configuration.
    """
    trainer_class = getattr(trl, f"{kind}Trainer")
    words, draws = {}, kind in ("GRPO", "RLOO")
    if draws:
        words["reward_funcs"] = [reward, length]
        trainer_class = type("Fixed", (FixedCompletions, trainer_class), {"lengths": lengths})
    if plan:
        from planc.integrations.trainer import PlancTrainerMixin

        trainer_class = type("Planned", (PlancTrainerMixin, trainer_class), {})
        words |= {"plan": plan, "overrides": [*FP32, *overrides]}
        rank, size = str(distributed.get_rank()), str(distributed.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the pool's group is there
    loader = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    with ExitStack() as stack:
        stack.callback(forget_processes)
        runs = stack.enter_context(TemporaryDirectory())
        forget_processes()
        given = {**STEPS, **OFF, **(DRAWS if draws else {}), **fields}
        arguments = getattr(trl, f"{kind}Config")(runs, per_device_train_batch_size=batch, **given)
        data = rows(kind)
        if reference:
            words["ref_model"] = loader.from_pretrained(folder)
            # ranks exchange the numbers of the reference model by a file beside the rows
            data = load_from_disk(f"{folder}/{'plan' if plan else 'alone'}")
        trainer = trainer_class(
            loader.from_pretrained(folder),
            args=arguments,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(folder),
            **words,
        )
        trainer.train()
        state = trainer.model.state_dict()
        if plan:
            state = trainer.planc_run.full_state_dict(every_rank=True)
        log = [one for one in trainer.state.log_history if "loss" in one]
        return log, {name: value.clone() for name, value in state.items()}
