"""The scripts of docs/trainer.md for TRL, accelerate and Lightning on four processes, beside the
same scripts without planc in one process.
"""

import ast
import json
import random
import re
import subprocess
import sys

import pytest
import torch
from folders import ROOT
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "trainer.md").read_text()
SCRIPTS = {n: text for text, n in re.findall(r"```python\n(# (\w+)\.py.*?)```", PAGE, re.S)}
FP32 = ["--set", "param_dtype=fp32", "--set", "reduce_dtype=fp32"]
MESHES = [["tp=2"], ["tp=2", "dp_replicate=2", "dp_shard=1"], ["dp_replicate=2"]]
WHOLE = "model = AutoModelForCausalLM.from_pretrained(options.weights)"
BUILT = [  # whole, where a plan has it on meta
    (r" *config = AutoConfig.*\n", ""),
    (r"with torch.device.*\n *((?:self\.)?)model = .*", rf"\1{WHOLE}"),
]
WORDS = [f"w{i}" for i in range(92)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=96)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("weights")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "<pad>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def run(folder, name, words, *, edits=()):
    """(the dictionaries that were printed, the weights) of a script, on four processes; in one
    process where planc is edited out of it.
    """
    script = SCRIPTS[name]
    for pattern, by in edits:
        script, count = re.subn(pattern, by, script)
        assert count, pattern
    command = [sys.executable, "-W", "ignore"]
    if edits:
        assert "planc." not in script.lower()
    else:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        words = [*words, *FP32]
    (folder / f"{name}.py").write_text(script)
    done = subprocess.run(
        [*command, f"{name}.py", *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "PL478" not in done.stderr  # the loops count labels, or all rows have as many
    printed = [ast.literal_eval(text) for text in re.findall(r"^{'.*}$", done.stdout, re.M)]
    return printed, load_file(folder / "runs" / "last" / "model.safetensors")


def same(found, right):
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=5e-6)


def settings(mesh):
    return [word for one in mesh for word in ("--set", one)]


# TRL


SFT = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_steps": 4,
    "logging_steps": 1,
    "max_grad_norm": 0.5,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "report_to": [],
}


def sft(folder, weights, mesh, rows, *words, packing=False, plan=True, steps=4):
    generator = random.Random(0)

    def text(least, most):
        return " ".join(generator.choices(WORDS, k=generator.randint(least, most)))

    lines = [{"prompt": text(2, 9), "completion": " " + text(1, 20)} for _ in range(64)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    packed = {"packing": True, "max_length": 32, "padding_free": False} if packing else {}
    given = {**SFT, **packed, "per_device_train_batch_size": rows, "max_steps": steps}
    (folder / "arguments.json").write_text(json.dumps(given))
    edits = [
        ("from planc.integrations.trainer import PlancTrainerMixin", ""),
        *BUILT,
        (r"trainer.planc_run.load.*", ""),
        (r"PlancTrainerMixin, ", ""),
        (r'plan="llama",\s*overrides=options.set,', ""),
        ("PlancSFTTrainer", "Plain"),
    ]
    words = [weights, "data.jsonl", "arguments.json", *settings(mesh), *words]
    log, tensors = run(folder, "sft", words, edits=() if plan else edits)
    kept = ("loss", "grad_norm", "num_tokens")
    lines = [{k: float(v) for k, v in line.items() if k in kept} for line in log if "loss" in line]
    return lines, tensors


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("mesh", MESHES[:2])
def test_trl(weights, tmp_path, mesh, packing):
    (tmp_path / "alone").mkdir()
    right, whole = sft(tmp_path / "alone", weights, [], 8, packing=packing, plan=False)
    assert len(right) == 4
    found, tensors = sft(tmp_path, weights, mesh, 4, packing=packing)
    for mine, theirs in zip(found, right, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4), (found, right)
    same(tensors, whole)


def test_the_script_of_trl_goes_on(weights, tmp_path):
    (tmp_path / "alone").mkdir()
    right, whole = sft(tmp_path / "alone", weights, [], 8, plan=False)
    first, _ = sft(tmp_path, weights, ["tp=2"], 4, steps=3)
    again, tensors = sft(tmp_path, weights, ["tp=2"], 4, "--resume")
    for mine, theirs in zip([*first, *again], right, strict=True):
        del mine["num_tokens"], theirs["num_tokens"]  # TRL counts from 0 again
        assert mine == pytest.approx(theirs, rel=2e-4)
    same(tensors, whole)


# accelerate


@pytest.fixture(scope="module")
def accelerated(weights, tmp_path_factory):
    """In one process a schedule steps once where two data ranks step it twice."""
    edits = [
        (
            r"import planc\nfrom planc.integrations.accelerate import PlancAccelerator",
            "import accelerate",
        ),
        *BUILT,
        (r"run = planc.apply.*", "plain = model"),
        (r"    run.load\(options.weights\)", "    pass"),
        (r"PlancAccelerator\(run, ", "accelerate.Accelerator("),
        (r"run\.model", "plain"),
        (r"StepLR\(optimizer, 8", "StepLR(optimizer, EVERY"),
    ]
    results = {}
    for data, every in ((2, 4), (4, 2)):
        folder = tmp_path_factory.mktemp("alone")
        text = [*edits[:-1], (edits[-1][0], edits[-1][1].replace("EVERY", str(every)))]
        results[data] = run(folder, "loop", [weights, "--rows", 8], edits=text)
    return results


LAUNCHED = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
"""What `accelerate launch` sets for its script, and what is not to be carried out beside a plan."""


@pytest.mark.parametrize(
    ("mesh", "launched"), [*((mesh, {}) for mesh in MESHES), (MESHES[0], LAUNCHED)]
)
def test_accelerate(accelerated, weights, tmp_path, monkeypatch, mesh, launched):
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    data = 2 if "tp=2" in mesh else 4
    right, whole = accelerated[data]
    words = [weights, "--rows", 8 // data, *settings(mesh)]
    found, tensors = run(tmp_path, "loop", words)
    assert len(found) == len(right) == 8
    for mine, theirs in zip(found, right, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert (mine["rows"], mine["lr"]) == (8, theirs["lr"])
    same(tensors, whole)
    assert (tmp_path / "runs" / "state" / ".metadata").is_file()


def test_the_script_of_accelerate_goes_on(accelerated, weights, tmp_path):
    right, whole = accelerated[2]
    words, found = [weights, "--rows", 4, *settings(["tp=2"])], []
    for steps in (3, 4, 4):
        printed, tensors = run(tmp_path, "loop", [*words, "--steps", steps])
        found += printed
    assert len(found) == len(right)  # the third run finds nothing to do
    for mine, theirs in zip(found, right, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["lr"] == theirs["lr"]
    same(tensors, whole)


# Lightning


SHUFFLED = "torch.utils.data.DistributedSampler(tokens, num_replicas=1, rank=0)"  # Lightning's own


def lit(folder, weights, mesh, rows, *words, plan=True, epochs=1, **more):
    given = {"accelerator": "cpu", "devices": 4 if plan else 1, "max_epochs": epochs}
    given |= {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "logger": False}
    given |= {"enable_progress_bar": False, "default_root_dir": "lit"}
    given |= more
    (folder / "arguments.json").write_text(json.dumps(given))
    edits = [
        ("from planc.integrations.lightning import PlancStrategy", ""),
        *BUILT,
        (r" +def on_fit_start.*\n.*\n", ""),
        (r"strategy = PlancStrategy.*", ""),
        (r"trainer = Trainer\(strategy=strategy, ", "module = Language()\ntrainer = Trainer("),
        (r"Language\(\), Data", "module, Data"),
        (r"batch_size=options.rows", f"batch_size=options.rows, sampler={SHUFFLED}"),
        (
            r'strategy.planc_run.export\("runs/last", replace=True\)',
            'module.model.save_pretrained("runs/last")',
        ),
    ]
    words = [weights, "arguments.json", "--rows", rows, *settings(mesh), *words]
    log, tensors = run(folder, "lit", words, edits=() if plan else edits)
    return log[0], tensors


@pytest.fixture(scope="module")
def lit_alone(weights, tmp_path_factory):
    return lit(tmp_path_factory.mktemp("alone"), weights, [], 4, plan=False)


@pytest.mark.parametrize("mesh", MESHES)
def test_lightning(lit_alone, weights, tmp_path, mesh):
    found, tensors = lit(tmp_path, weights, mesh, 2 if "tp=2" in mesh else 1)
    assert found == pytest.approx(lit_alone[0], rel=1e-4)
    same(tensors, lit_alone[1])


def test_lightning_goes_on_where_it_stopped(weights, tmp_path):
    (tmp_path / "alone").mkdir()
    odd = {"limit_train_batches": 7}
    right, whole = lit(tmp_path / "alone", weights, [], 4, plan=False, epochs=2, **odd)
    lit(tmp_path, weights, ["tp=2"], 2, **odd)
    [folder] = (tmp_path / "lit" / "checkpoints").iterdir()
    assert (folder / ".metadata").is_file()
    found, tensors = lit(tmp_path, weights, ["tp=2"], 2, "--resume", folder, epochs=2, **odd)
    assert found == pytest.approx(right, rel=1e-4)
    same(tensors, whole)


def test_lightning_takes_the_precision_of_the_plan(weights, tmp_path):
    with pytest.raises(AssertionError, match="the plan's `precision` is that of the run"):
        lit(tmp_path, weights, ["tp=2"], 2, precision="bf16-mixed")
