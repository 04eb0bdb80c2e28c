"""A script of TRL's trainers that train one model: torchrun preferences.py KIND DATA OPTIONS.

Under a plan where OPTIONS name one; else TRL alone.
"""

import argparse
import json
import random

import torch
import trl
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("weights")
parser.add_argument("data")
parser.add_argument("arguments", type=json.loads)
parser.add_argument("--plan")
parser.add_argument("--set", action="append", default=[])
parser.add_argument("--positional", action="store_true")
parser.add_argument("--draw", action="store_true")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
Trainer = getattr(trl, f"{options.kind}Trainer")
more = {}


class FixedCompletions(Trainer):
    """Completions that follow from the prompt and the row, whatever rank has it."""

    def _generate_single_turn(self, prompt_ids, *rest, **named):
        first, made = self.accelerator.process_index * len(prompt_ids), []
        for row, ids in enumerate(prompt_ids, first):
            numbers = random.Random(f"{ids} {row % self.num_generations}")
            made.append([*numbers.choices(range(4, 96), k=numbers.randint(2, 8)), 2])
        return (made, None) if options.kind == "GRPO" else made


def reward(completions, **_):
    return [sum(int(word[1:]) % 7 for word in text.split()) / 10 for text in completions]


if options.kind in ("GRPO", "RLOO"):
    more["reward_funcs"] = reward
    Trainer = Trainer if options.draw else FixedCompletions
loader = AutoModelForSequenceClassification if options.kind == "Reward" else AutoModelForCausalLM
if options.plan:
    from planc.integrations.trainer import PlancTrainerMixin

    class PlancTrainer(PlancTrainerMixin, Trainer):
        """TRL's trainer under a plan."""

    Trainer = PlancTrainer
    more |= {"plan": options.plan, "overrides": options.set}
    config = AutoConfig.from_pretrained(options.weights)
    with torch.device("meta"):
        model = loader.from_config(config, dtype=torch.float32)
else:
    model = loader.from_pretrained(options.weights)
arguments = getattr(trl, f"{options.kind}Config")("runs", **options.arguments)
rows = load_dataset("json", data_files=options.data, split="train")
if options.positional:
    trainer = Trainer(model, None, arguments, train_dataset=rows, **more)
else:
    trainer = Trainer(model, args=arguments, train_dataset=rows, **more)
if options.plan:
    trainer.planc_run.load(options.weights)
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model("runs/last")
