"""TRL's trainers that train one model, on four processes beside one."""

import ast
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_other_loops import FP32, SFT, WORDS, same, settings, weights  # noqa: F401
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "preferences.py"
TP, HSDP = ["tp=2", "sequence=false"], ["dp_replicate=2"]
LORA = """plan lora for llama

extend "llama.plan"

adapters {
    $blocks.self_attn.{q,k,v,o}_proj : lora(rank = 4, alpha = 8)
}
"""


@pytest.fixture(scope="module")
def data(weights, tmp_path_factory):  # noqa: F811
    """A folder with rows of each kind, and a model with one number as its head."""
    folder, numbers = tmp_path_factory.mktemp("data"), random.Random(0)

    def text(least, most):
        return " ".join(numbers.choices(WORDS, k=numbers.randint(least, most)))

    pairs = [
        {"prompt": text(2, 9), "chosen": f" {text(1, 12)}", "rejected": f" {text(1, 12)}"}
        for _ in range(64)
    ]
    judged = [
        {"prompt": p["prompt"], "completion": p["chosen"], "label": bool(i % 3)}
        for i, p in enumerate(pairs)
    ]
    prompts = [{"prompt": p["prompt"]} for p in pairs]
    for name, rows in (("pairs", pairs), ("judged", judged), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(weights)
    base.config.num_labels, base.config.pad_token_id = 1, 3
    LlamaForSequenceClassification(base.config).save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(weights).save_pretrained(folder / "reward")
    return folder


DATA = {"DPO": "pairs", "KTO": "judged", "Reward": "pairs", "GRPO": "prompts", "RLOO": "prompts"}
MORE = {
    "DPO": {},
    "KTO": {"loss_type": "apo_zero_unpaired"},  # others pair rows by the rows of a rank
    "Reward": {},
    "GRPO": {"max_completion_length": 8, "num_generations": 4, "beta": 0.1},
    "RLOO": {  # gradients that cancel but for rounding, which AdamW would make large
        "max_completion_length": 8,
        "num_generations": 4,
        "optim": "sgd",
        "learning_rate": 0.05,
    },
}


def trained(folder, kind, data, weights, rows, *words, plan=None, **more):  # noqa: F811
    """The result of the script in a folder: its process, and what it logs."""
    given = {**SFT, **MORE[kind], "per_device_train_batch_size": rows, **more}
    place = data / "reward" if kind == "Reward" else weights
    command = [sys.executable, "-W", "ignore"]
    if plan:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        words = (*words, *FP32, "--plan", plan)
    folder.mkdir(exist_ok=True)
    rest = [kind, place, data / f"{DATA[kind]}.jsonl", json.dumps(given), *words]
    done = subprocess.run(
        [*command, SCRIPT, *map(str, rest)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    found = re.findall(r"{'loss.*?}", done.stdout, re.S)
    kept = ("loss", "grad_norm", "reward", "entropy", "num_tokens", "margin", "accuracy")
    logged = [{k: float(v) for k, v in ast.literal_eval(s).items() if k in kept} for s in found]
    return done, logged


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("DPO", TP),
        ("KTO", TP),
        ("Reward", TP),
        ("Reward", ["tp=2"]),
        ("DPO", HSDP),
        ("GRPO", HSDP),
        ("RLOO", []),
    ],
)
def test_a_trainer_trains_as_in_one_process(data, weights, tmp_path, kind, mesh):  # noqa: F811
    alone, right = trained(tmp_path / "alone", kind, data, weights, 8)
    assert alone.returncode == 0, alone.stderr[-2000:]
    rows, plan = 4 if "tp=2" in mesh else 2, "classifier" if kind == "Reward" else "llama"
    words = [*settings(mesh), *(["--positional"] if kind in ("DPO", "KTO") else [])]
    done, found = trained(tmp_path / "four", kind, data, weights, rows, *words, plan=plan)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(right) == 4
    for mine, theirs in zip(found, right, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-4), (found, right)
    last = Path("runs/last/model.safetensors")
    after, before = load_file(tmp_path / "alone" / last), load_file(weights / last.name)
    same(load_file(tmp_path / "four" / last), after)
    name = "model.layers.1.mlp.up_proj.weight"
    assert kind == "Reward" or (after[name] - before[name]).abs().max() > 1e-4


def test_ranks_draw_completions_under_fsdp(data, weights, tmp_path):  # noqa: F811
    greedy = {"top_k": 1, "max_steps": 2, "num_generations": 2}
    _, right = trained(tmp_path / "alone", "GRPO", data, weights, 8, "--draw", **greedy)
    words = ("--draw", *settings(HSDP))
    done, found = trained(
        tmp_path / "four", "GRPO", data, weights, 2, *words, plan="llama", **greedy
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(found) == 2
    for mine, theirs in zip(found, right, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-4)


@pytest.mark.parametrize(
    ("kind", "mesh", "more", "message"),
    [
        ("DPO", ["tp=2"], {}, "sequence parallelism shards that state: set sequence=false"),
        ("GRPO", TP, {}, "the ranks of tp would train on different ones. Set tp=1"),
        ("DPO", TP, {"sync_ref_model": True}, "sync_ref_model copies whole weights"),
        ("DPO", TP, {"precompute_ref_log_probs": True}, "hashes all weights: pass a ref_model"),
        ("DPO", TP, {"bf16": True}, "the plan decides bf16"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused(data, weights, tmp_path, kind, mesh, more, message):  # noqa: F811
    words = settings(mesh)
    done, _ = trained(tmp_path, kind, data, weights, 4, *words, plan="llama", **more)
    assert done.returncode != 0
    assert "ValueError: " in done.stderr
    assert message in done.stderr


def test_another_trainer_of_trl_is_refused_by_name():
    from trl import DistillationTrainer, SFTTrainer

    from planc.integrations import trainer

    class Mine(trainer.PlancTrainerMixin, DistillationTrainer):
        pass

    class Tried(trainer.PlancTrainerMixin, SFTTrainer):
        pass

    with pytest.raises(ValueError, match="TRL's DistillationTrainer was not compared"):
        trainer._require_tried(Mine, None)
    parameters = trainer._signature(Mine).parameters
    assert [*parameters][:3] == ["model", "teacher_model", "args"]
    assert [*trainer._signature(Tried).parameters][:2] == ["model", "args"]


def test_adapters_are_saved_and_go_on(data, weights, tmp_path):  # noqa: F811
    """Three steps, and then two more, are five; the checkpoint holds no base model."""
    plan = str(tmp_path / "lora.plan")
    Path(plan).write_text(LORA)
    words, every = settings(TP), {"save_strategy": "steps", "save_steps": 2}
    whole, right = trained(
        tmp_path / "whole", "DPO", data, weights, 4, *words, plan=plan, max_steps=5, **every
    )
    assert whole.returncode == 0, whole.stderr[-4000:]
    logged = []
    for steps, resume in ((3, []), (5, ["--resume"])):
        done, some = trained(
            tmp_path / "parts",
            *("DPO", data, weights, 4, *words, *resume),
            plan=plan,
            max_steps=steps,
            **every,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        logged += some
    for mine, theirs in zip(logged, right, strict=True):
        del mine["num_tokens"], theirs["num_tokens"]  # TRL counts from 0 again
        assert mine == pytest.approx(theirs, rel=1e-4)
    base = AutoModelForCausalLM.from_pretrained(weights)
    ends = []
    for part in ("whole", "parts"):
        checkpoint = tmp_path / part / "runs" / "checkpoint-5"
        assert not (checkpoint / "model.safetensors").exists()
        held = FileSystemReader(checkpoint / "planc").read_metadata().state_dict_metadata
        assert {"lora_" in name for name in held if name.startswith("model.")} == {True}
        model = PeftModel.from_pretrained(base, str(tmp_path / part / "runs" / "last"))
        ends.append({n: p.clone() for n, p in model.named_parameters() if "lora_" in n})
        base = model.unload()
    same(*ends)
    assert any(p.abs().max() > 1e-4 for n, p in ends[0].items() if "lora_B" in n)
