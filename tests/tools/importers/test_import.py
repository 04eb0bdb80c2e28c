"""`planc import`: every key of every library's file is accounted for, and the plan compiles."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from console import call
from folders import ROOT

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.ops.expert_capacity import LimitExperts
from planc.syntax.formatter.layout import laid_out
from planc.syntax.parse import parse
from planc.tools.importers.family import family_of, named_by
from planc.tools.importers.importer import import_plan
from planc.tools.importers.peer import NAMES, REASONS, peers
from planc.tools.importers.reading import leaves, text_of
from planc.tools.importers.settings import Unknown, value_of

FOLDER = Path(__file__).parent / "files"
KEYS = [line.split(" ", 1) for line in (FOLDER / "keys.txt").read_text().splitlines()]
"""(library, key) of keys that occur in the libraries' own examples."""
FILES = {  # file: (library, model, ranks)
    "accelerate.yaml": ("accelerate", "qwen3-8b", 16),
    "axolotl.yaml": ("axolotl", "llama-3.1-8b", 8),
    "automodel.yaml": ("automodel", "qwen3-30b-a3b", 64),
    "torchtitan.toml": ("torchtitan", "llama-3.1-70b", 64),
    "registry.py:llama3_8b": ("torchtitan", "llama-3.1-8b", 8),
    "registry.py:llama3_8b_wide": ("torchtitan", "llama-3.1-8b", 8),
    "transformers.json": ("transformers", "qwen3-8b", 8),
    "deepspeed.json": ("deepspeed", "llama-3.1-8b", 8),
    "megatron.sh": ("megatron", "llama-3.1-70b", 32),
    "megatron_moe.sh": ("megatron", "mixtral-8x7b", 8),
    "bridge.yaml": ("bridge", "llama-3.1-70b", 32),
    "prime_rl.toml": ("prime-rl", "qwen3-8b", 8),
    "trainer.json": ("trainer", "llama-3.1-8b", 8),
    "llamafactory.yaml": ("llamafactory", "llama-3.1-8b", 8),
    "llamafactory_v1.yaml": ("llamafactory_v1", "qwen3-8b", 8),
    "swift.sh": ("swift", "qwen3-8b", 4),
    "axolotl_fp8.yaml": ("axolotl", "llama-3.1-8b", 8),
    "torchtitan_fp8.toml": ("torchtitan", "llama-3.1-8b", 8),
    "accelerate_fp8.yaml": ("accelerate", "llama-3.1-8b", 8),
}


def run(name, **more):
    sink = Sink()
    result = import_plan(str(FOLDER / name), sink, peer=None, model=more.pop("model", None))
    return result, sink


def leaf_paths(name):
    path, _, function = name.rpartition(":")
    path = str(FOLDER / (path or function))
    found = leaves(path, text_of(path, Sink()), function if ":" in name else None, Sink())
    return Counter(leaf.path for leaf in found)


def keys_in(text):
    """The keys that the comments of a plan name, with their braces expanded."""
    comments = " ".join(line.partition("#")[2].strip() for line in text.splitlines() if "#" in line)
    for holder, inner in re.findall(r"([^\s,{}]*)\{([^{}]*)\}", comments):
        yield from (f"{holder}{last.strip()}" for last in inner.split(","))
    yield from re.split(r"[,:] | = |, ", comments)
    yield comments


@pytest.mark.parametrize("library", NAMES)
def test_real_keys_have_a_meaning(library):
    """And no key falls to a table's row by accident: each word of the table is known."""
    peer = peers()[library]
    own = [key for name, key in KEYS if name == library]
    assert len(own) >= 9
    assert not [key for key in own if peer.meaning(key) is None]
    assert sum(len(list(own)) for own in [KEYS]) > 1400


@pytest.mark.parametrize("library", NAMES)
def test_words_of_the_tables(library):
    """A word is a reason, or a setting that reads a value and that the writer has."""
    folder = ROOT / "planc" / "tools" / "importers"
    names = ("writing.py", "transformers_plans.py")
    text = "".join((folder / name).read_text() for name in names)
    for word in {*peers()[library].keys, *peers()[library].absent} - REASONS.keys():
        assert f'"{word}"' in text, word
        try:
            value_of(word, 2)
        except Unknown as error:
            assert str(error)


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_accounted_for(name):
    library, model, _ = FILES[name]
    result, sink = run(name, model=model)
    assert not sink.has_errors and result.peer.name == library
    assert Counter(leaf.path for leaf, _, _ in result.fate) == leaf_paths(name)
    named = set(keys_in(result.text))
    for leaf, kind, why in result.fate:
        shown = any(leaf.path in each.split(", ") or leaf.path == each for each in named)
        rule = re.sub(r".*tp_plan\.(layers\.\*\.)?", "", leaf.path)
        assert shown or leaf.path in result.text or rule in result.text, (leaf.path, kind, why)
        assert why


@pytest.mark.parametrize("name", FILES)
def test_the_plan_compiles(name, tmp_path):
    """It is in the canonical layout, but for its last comments, and without errors."""
    _, model, ranks = FILES[name]
    result, _ = run(name, model=model)
    assert laid_out(result.text) == result.text
    (tmp_path / "a.plan").write_text(result.text)
    sink = Sink()
    compiled = compile_plan(model, str(tmp_path / "a.plan"), sink, world_size=ranks, settings=())
    assert compiled.lowered and not sink.has_errors, [d.message for d in sink]


@pytest.mark.parametrize(
    ("library", "key", "value", "line"),
    [
        ("axolotl", "tensor_parallel_size", 4, "override tp = 4"),
        ("axolotl", "gradient_checkpointing", False, "override option recompute = false"),
        ("axolotl", "torch_compile", True, "$blocks : block"),
        ("automodel", "distributed.strategy", "ddp", "override dp_replicate = auto"),
        ("automodel", "fsdp.dp_replicate_size", 2, "override dp_replicate = 2"),
        ("deepspeed", "zero_optimization.stage", 2, "override $blocks : unit(reshard = never)"),
        ("deepspeed", "zero_optimization.offload_param.device", "cpu", "offload(cpu)"),
        ("torchtitan", "training.dtype", "bfloat16", "dtype = bf16"),
        ("torchtitan", "experimental.pipeline_parallel_degree", 2, "override pp = 2"),
        ("megatron", "MODEL_ARGS.--context-parallel-size", 2, "override cp = 2"),
        ("megatron", "MODEL_ARGS.--grad-reduce-in-bf16", True, 'reduce_dtype = "bf16"'),
        ("deepspeed", "train_batch_size", 8, 'override option param_dtype = "fp32"'),
        ("automodel", "model.dtype", "bfloat16", "dtype = bf16"),
    ],
)
def test_settings(library, key, value, line, tmp_path):
    kinds = {"deepspeed": "json", "torchtitan": "json"}
    values = {}
    for path, given in ((key, value), *SIGNS[library].items()):
        at = values
        *above, last = path.split(".")
        for part in above:
            at = at.setdefault(part, {})
        at[last] = given
    path = tmp_path / f"a.{kinds.get(library, 'yaml')}"
    path.write_text(json.dumps(values))
    result = import_plan(str(path), Sink(), peer=library, model="llama-3.1-8b")
    assert line in re.sub(" +", " ", result.text)


@pytest.mark.parametrize(
    ("library", "values", "expected", "absent"),
    [
        (  # five stages a rank are five, not the plan's two
            "megatron",
            "--pipeline-model-parallel-size 2 --num-layers 80 --micro-batch-size 1 "
            "--num-layers-per-virtual-pipeline-stage 8",
            'schedule = "interleaved_1f1b" # | stages = even($blocks, each = 5) # num-layers-per',
            "to decide",
        ),
        (  # which the number of layers does not give
            "megatron",
            "--pipeline-model-parallel-size 2 --num-layers 81 --micro-batch-size 1 "
            "--num-layers-per-virtual-pipeline-stage 8",
            "even($blocks, each = N)`: num-layers-per-virtual-pipeline-stage = 8",
            "interleaved",
        ),
        (
            "megatron",
            "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 3 "
            "--num_layers 36",
            "even($blocks, each = 3)",
            "unknown to planc",
        ),
        (  # microbatches of a data rank: 64 rows of 4 ranks by 2
            "megatron",
            "torchrun --nproc-per-node 8 --tensor-model-parallel-size 2 "
            "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 64",
            "microbatches = 16 # micro-batch-size, global-batch-size",
            "to decide",
        ),
        (
            "megatron",
            "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 32",
            "their number is not in the file: global-batch-size = 32",
            "option microbatches",
        ),
        (  # planc steps what is loaded, and reduces in reduce_dtype: neither says these
            "megatron",
            "--num-layers 2 --micro-batch-size 1 --use-precision-aware-optimizer "
            "--main-grads-dtype bf16 --exp-avg-dtype bf16",
            "training script: use-precision-aware-optimizer = True, main-grads-dtype = bf16, "
            "exp-avg-dtype = bf16",
            "planc do so by themselves: use",
        ),
        ("megatron", "--num-layers 2 --main-grads-dtype fp32", "off: main-grads-dtype", "decide"),
        (
            "megatron",
            "--num-layers 2 --micro-batch-size 1 --moe-expert-capacity-factor 1.25",
            "$experts : dispatch(all_to_all, capacity = 1.25, drop = probs) # moe-expert-capacity",
            "decide",
        ),
        (  # a factor below 0 is none
            "megatron",
            "--num-layers 2 --micro-batch-size 1 --moe-expert-capacity-factor -1.0 "
            "--moe-token-drop-policy position",
            "not set: moe-expert-capacity-factor | no token is dropped: moe-token-drop-policy",
            "dispatch",
        ),
        (
            "deepspeed",
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "override $blocks : unit(reshard = 8) # zero_optimization.zero_hpz",
            "decide",
        ),
        (
            "deepspeed",
            {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
            "override dp_replicate = auto # zero_optimization.mics_shard_size | "
            "override dp_shard = 8 # zero_optimization.mics_shard_size",
            "decide",
        ),
        (  # dynamic loss scaling is not "off"
            "deepspeed",
            {"fp16": {"enabled": True, "loss_scale": 0}, "steps_per_print": 1},
            "fp16 without a gradient scaler",
            "off: fp16",
        ),
        (
            "axolotl",
            {"base_model": "x", "adapter": "lora", "lora_r": 16, "lora_alpha": 32,
             "peft_use_rslora": True},
            "lora(rank = 16, alpha = 32, rslora = true) #",
            "decide",
        ),
        (
            "axolotl",
            {"base_model": "x", "adapter": "lora", "lora_r": 16, "peft_use_dora": True},
            "lora(rank = 16, dora = true) #",
            "decide",
        ),
        (
            "llamafactory",
            {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "use_dora": True},
            "$blocks.**<Linear> : lora(rank = 8, alpha = 16, dora = true)",
            "decide",
        ),
        (
            "axolotl",
            {"base_model": "x", "adapter": "qlora", "lora_r": 16, "peft_use_dora": True},
            "no DoRA of 4-bit weights",
            "left: peft_use_dora",
        ),
        (  # peft has no dropout on the weights of experts
            "axolotl",
            {"base_model": "x", "adapter": "lora", "lora_r": 16, "lora_dropout": 0.1,
             "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
            "**.mlp.experts : lora(rank = 16, parameters = [gate_up_proj, down_proj])",
            "decide",
        ),
        (
            "llamafactory",
            {"stage": "sft", "finetuning_type": "lora", "lora_rank": 16, "lora_target": "all",
             "quantization_bit": 4, "double_quantization": True},
            "$blocks.**<Linear> : qlora(rank = 16, alpha = 32, double = true)",
            "decide",
        ),
        (
            "automodel",
            {"recipe": "x", "freeze_config": {"freeze_embeddings": True}},
            "**<Embedding> : frozen # freeze_config.freeze_embeddings",
            "decide",
        ),
        (  # counted as in the plan, and in no line of it
            "axolotl",
            {"base_model": "x", "adapter": "lora", "lora_r": 8,
             "bnb_config_kwargs": {"bnb_4bit_use_double_quant": True}},
            "without effect: no 4-bit weights: bnb_config_kwargs",
            "double =",
        ),
        (
            "trainer",
            {"num_train_epochs": 1, "fsdp": "full_shard auto_wrap offload",
             "gradient_checkpointing": False, "bf16": True},
            "override option recompute = false # gradient_checkpointing | offload(cpu) # fsdp",
            "decide",
        ),
        (
            "axolotl",
            {"base_model": "x", "gradient_checkpointing": "offload",
             "fsdp_config": {"activation_checkpointing": True}},
            "$blocks : full(offload = cpu) #",
            "decide",
        ),
        (
            "axolotl",
            {"base_model": "x", "gradient_checkpointing": "unsloth"},
            "$blocks : full(offload = cpu) #",
            "decide",
        ),
        (  # nothing is offloaded by this plan
            "deepspeed",
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
            "optimizer state stays on the device: `offload(cpu)` offloads it with its parameters",
            " : offload(cpu)",
        ),
        (
            "deepspeed",
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
                                   "offload_param": {"device": "cpu"}}},
            "offload(cpu) # zero_optimization.offload_param.device",
            "stays on the device",
        ),
        (
            "swift",
            {"model": "x", "moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "position"},
            "dispatch(all_to_all, capacity = 1.5, drop = position)",
            "decide",
        ),
        (
            "automodel",
            {"recipe": "x", "model": {"freeze_router": True, "backend": {"freeze_router": True}}},
            "to decide, 2 keys: | : model.freeze_router = True, model.backend.freeze_router = True",
            "kernels",
        ),
        (
            "torchtitan",
            {"model": {"name": "x"}, "model_spec": {"non_blocking_capacity_factor": 1.5}},
            "an `expert` section says how many tokens",
            "kernels",
        ),
    ],
)  # fmt: skip
def test_nothing_is_dropped_and_nothing_invented(library, values, expected, absent, tmp_path):
    text = values if isinstance(values, str) else json.dumps(values)
    path = tmp_path / ("a.sh" if isinstance(values, str) else "a.json")
    path.write_text(text)
    result = import_plan(str(path), Sink(), peer=library, model="llama-3.1-8b")
    flat = re.sub("[ \n]+#?[ \n]*", " ", re.sub("    #", " #", result.text).replace("\n#  ", "\n"))
    for part in expected.split(" | "):
        assert re.sub(" +#? *", " ", part) in flat, (part, flat)
    assert absent not in flat


@pytest.mark.parametrize(
    ("name", "file", "code"),
    [
        ("a.yaml", "base_model: x\nlearning_rate: 1e-4\n", 0),
        ("a.yaml", "base_model: x\nload_in_8bit: true\n", 1),
        ("a.yaml", "base_model: x\nload_in_8bitt: true\n", 1),
        ("a.json", '{"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}}', 0),
    ],
)
def test_exit_code_tells_what_changes_numbers(name, file, code, tmp_path):
    """Buckets change no number; what trains another model does, or may."""
    (tmp_path / name).write_text(file)
    assert call("import", tmp_path / name, "--model", "llama-3.1-8b")[0] == code


@pytest.mark.parametrize(
    ("classes", "kind", "line"),
    [
        ("OwnBlock", "plan", "override let blocks = **<OwnBlock>"),
        ("OwnBlock,Two", "cost", ""),  # blocks by the role, of whatever class
    ],
)
def test_a_wrapped_class_is_the_blocks_of_a_family_without_a_plan(classes, kind, line, tmp_path):
    key = "fsdp_transformer_layer_cls_to_wrap"
    text = f"distributed_type: FSDP\nfsdp_config:\n  {key}: {classes}"
    (tmp_path / "a.yaml").write_text(text)
    result = import_plan(str(tmp_path / "a.yaml"), Sink(), peer=None, model=None)
    assert [of for leaf, of, _ in result.fate if key in leaf.path] == [kind]
    assert line in result.text and ("let blocks" in result.text) is bool(line)


@pytest.mark.parametrize(
    ("script", "keys"),
    [
        ("TP=8; PP=4; CP=2\nrun --tp $TP --pp ${PP} --cp=$CP", {"tp": 8, "pp": 4, "cp": 2}),
        ("export TP=8 PP=4\nrun --tp $TP --pp $PP", {"tp": 8, "pp": 4}),
        ("run --tp ${TP:-8} --pp \"${PP:-'4'}\" --cp ${CP-2}", {"tp": 8, "pp": 4, "cp": 2}),
        ("TP=2\nrun --tp ${TP:-8}", {"tp": 2}),
        (": ${TP:=8}\nrun --tp $TP", {"tp": 8}),
        ("TP=2\nTP=4\nrun --tp $TP", {"tp": 4}),
        ("if a; then TP=2; else TP=4; fi\nrun --tp $TP", {"tp": "$TP"}),  # either
        ('if [ -z "$TP" ]; then\n  TP=2\nfi\nrun --tp $TP', {"tp": 2}),
        ("TP=2\ntest && TP=4\nrun --tp $TP", {"tp": "$TP"}),
        ("run --tp '$TP' # don't --pp 2\nrun --cp 2", {"tp": "$TP", "cp": 2}),
        ("run --data a/b#500 --tp 2", {"data": "a/b#500", "tp": 2}),
        ("run --tp 2 > --log\necho done", {"tp": 2}),
        ("A=(\n  --tp 2 # it's\n  --x\n)\nrun ${A[@]} --pp 2", {"tp": 2, "x": True, "pp": 2}),
        ('A="--tp 2 \\\n --pp 4"\nrun $A', {"tp": 2, "pp": 4}),
        ('T=2\nbash -c "run --tp $T --pp 2"', {"tp": 2, "pp": 2}),
        ('T="q v"\nrun --a $T --b "$T"', {"a": ["q", "v"], "b": "q v"}),
        ("run --overlap\nsleep 5", {"overlap": True}),
    ],
)
def test_a_script_is_read_by_the_rules_of_a_shell(script, keys):
    found = leaves("a.sh", script, None, Sink())
    read = {leaf.path: leaf.value for leaf in found if leaf.path not in ("log", "export TP",
                                                                        "export PP")}  # fmt: skip
    assert read == keys


def test_variables_that_double_themselves_end(tmp_path):
    doubled = "\n".join(f"A{n + 1}=$A{n}$A{n}" for n in range(60))
    sink = Sink()
    assert leaves("a.sh", f"A0=xx\n{doubled}\nrun --tp $A60", None, sink) is None
    assert [d.code for d in sink] == ["PL731"]


@pytest.mark.parametrize(
    ("name", "family", "code"),
    [
        ("Qwen/Qwen3-8B", "qwen3", 0),  # a shipped model
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "qwen3", 1),
        ("me/Tuned-Llama-3.1", "llama", 1),
    ],
)
def test_a_guess_is_a_finding(name, family, code, tmp_path):
    (tmp_path / "a.yaml").write_text(f"base_model: {name}\nmicro_batch_size: 1\n")
    found, plan, errors = call("import", tmp_path / "a.yaml")
    assert found == code and f"for {family}\n" in plan
    assert ("[PL647]" in errors) is bool(code)


def test_a_capacity_is_one_of_the_plan(tmp_path):
    """With the numbers of the file, also where no rank divides experts; padding changes none."""
    result, sink = run("megatron_moe.sh", model="mixtral-8x7b")
    fates = {leaf.path: kind for leaf, kind, _ in result.fate if "moe-" in leaf.path}
    assert fates["moe-pad-expert-input-to-capacity"] == "cost"
    assert {d.code for d in sink} == {"PL736"}  # the dispatcher alone
    (tmp_path / "a.plan").write_text(result.text)
    for ranks in ("4", "1"):
        lowered = planc.lower(
            "mixtral-8x7b", str(tmp_path / "a.plan"), world_size=8, overrides=[f"ep={ranks}"]
        )
        (op,) = lowered.find_ops(LimitExperts)
        assert (op.capacity, op.drop, op.sent) == (1.5, "position", ranks != "1")


def test_a_plan_of_no_family_is_proved_for_any(tmp_path):
    wrapped = "fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer"
    text = f"distributed_type: FSDP\nfsdp_config:\n  {wrapped}"
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "a.plan").write_text(
        import_plan(str(tmp_path / "a.yaml"), Sink(), peer=None, model=None).text
    )
    code, found, errors = call("check", "llama-3.1-8b", tmp_path / "a.plan", "--world-size", 8)
    assert (code, errors) == (0, "") and "proved" in found


@pytest.mark.parametrize(
    ("family", "rule", "optional"),
    [
        ("qwen3", "layers.*.mlp.gate_porj", False),  # PL101, and not an MLP that is not split
        ("qwen3", "layers.*.mlp.gate_proj", False),
        ("qwen3_moe", "layers.*.mlp.gate_proj", True),  # a model whose blocks all have experts
        ("qwen3_moe", "layers.*.self_attn.q_proj", False),
    ],
)
def test_optional_is_what_a_configuration_lacks(family, rule, optional, tmp_path):
    rules = {rule: "colwise", "layers.*.mlp.down_proj": "rowwise"}
    values = {"model_type": family, "tp_size": 2, "base_model_tp_plan": rules}
    (tmp_path / "a.json").write_text(json.dumps(values))
    result = import_plan(str(tmp_path / "a.json"), Sink(), peer=None, model=None)
    path = rule.replace("layers.*", "$blocks")
    assert (f"optional {path} " in result.text) is optional
    assert f"{path} " in result.text


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("a.sh", "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=x", "verl"),
        ("a.yaml", "actor_rollout_ref:\n  actor:\n    strategy: fsdp", "verl"),
        ("a.yaml", "policy:\n  dtensor_cfg:\n    tensor_parallel_size: 2", "NeMo-RL"),
        ("a.py", "from olmo_core.train import TrainerConfig", "OLMo-core"),
        ("a.yml", "base_emb_dim: 4096\nici_tensor_parallelism: 4", "MaxText"),
        ("a.py", "from megatron.bridge.recipes import x", "Megatron-Bridge"),
    ],
)
def test_libraries_that_are_known_by_name(name, text, title, tmp_path):
    (tmp_path / name).write_text(text)
    code, plan, errors = call("import", tmp_path / name)
    flat = " ".join(errors.split())
    assert (code, plan) == (2, "") and "[PL732]" in flat
    assert title in flat and "not a library planc reads" in flat


@pytest.mark.parametrize(
    ("word", "attention"),
    [
        ("allgather", "all_gather"),
        ("all_gather", "all_gather"),
        ("alltoall", "ring"),  # torch's rotation of keys and values, of torchtitan and accelerate
        ("p2p", "ring"),  # Megatron's words
        ("a2a", "ulysses"),
        ("varlen_llama3", "all_gather"),  # Axolotl's
        ("batch_ring", "ring"),
    ],
)
def test_exchanges_of_attention(word, attention):
    assert value_of("attention", word) == attention


SIGNS = {
    "axolotl": {"base_model": "x"},
    "automodel": {"recipe": "x"},
    "deepspeed": {"steps_per_print": 1},
    "torchtitan": {"model.flavor": "8B"},
    "megatron": {"MODEL_ARGS.--num-layers": 2},
}

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 10)}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.yaml", "base_model: [", "PL731"),
        ("a.yaml", "base_model: a\nbase_model: b", "PL731"),
        ("a.yaml", "base_model: !!python/object/apply:os.system [echo]", "PL731"),
        ("a.yaml", f"base_model: x\n{BOMB}", "PL731"),
        ("a.yaml", "base_model: &a [*a]", "PL731"),
        ("a.yaml", "{" * 400, "PL731"),
        ("a.yaml", "base_model: x\n---\nb: 1", "PL731"),
        ("a.yaml", "? [a, b]\n: c", "PL731"),
        ("a.yaml", "- a\n- b", "PL731"),
        ("a.yaml", " \n", "PL731"),
        ("a.yaml", "# nothing yet", "PL732"),
        ("a.yaml", "base_model: \x00", "PL731"),
        ("a.yaml", "x" * 600_000, "PL730"),
        ("a.json", '{"zero_optimization": {"stage": 1, "stage": 2}}', "PL731"),
        ("a.json", "[" * 100_000, "PL731"),
        ("a.json", "[1]", "PL731"),
        ("a.json", '{"tp_size": ' + "9" * 5000 + "}", "PL731"),
        ("a.toml", "[job\n", "PL731"),
        ("a.toml", "x = 1", "PL732"),
        ("a.py", "def f(:", "PL731"),
        ("a.py", "x = 1", "PL737"),
        ("a.py", "-" * 50_000 + "1", "PL731"),
        ("a.sh", "echo --verbose", "PL732"),
        ("a.yaml", "number_of_ranks: 8", "PL732"),
    ],
)
def test_bad_files(name, text, code, tmp_path):
    (tmp_path / name).write_text(text)
    exit_code, plan, errors = call("import", tmp_path / name)
    assert (exit_code, plan) == (2, "")
    assert f"[{code}]" in errors, errors


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ('{"tp_size": 2, "tp_sise": 3}', ["tp_sise"]),
        ('{"model_type": "llama", "hidden": 8, "tp_size": 2}', []),
        ('{"tp_size": 2, "tp_plan": "auto", "fsdp_sizze": 4}', ["fsdp_sizze"]),
        (
            '{"model_type": "llama", "distributed_config": {"tp_sise": 3, "tp_size": 2}}',
            ["distributed_config.tp_sise"],
        ),
    ],
)
def test_a_misspelled_key_is_not_the_models(text, unknown, tmp_path):
    (tmp_path / "a.json").write_text(text)
    result = import_plan(str(tmp_path / "a.json"), Sink(), peer=None, model="llama-3.1-8b")
    assert [leaf.path for leaf, kind, _ in result.fate if kind == "unknown"] == unknown


def test_a_misspelled_key_of_a_covered_group_is_asked_about(tmp_path):
    """`training.*` is the script's, but not a key that one letter keeps from being a setting."""
    (tmp_path / "a.toml").write_text(
        'model.name = "llama3"\n[training]\nenable_cpu_ofload = true\nsteps = 10\n'
    )
    result = import_plan(str(tmp_path / "a.toml"), Sink(), peer=None, model=None)
    told = {leaf.path: (kind, why) for leaf, kind, why in result.fate}
    assert told["training.enable_cpu_ofload"] == ("unknown", "did you mean enable_cpu_offload?")
    assert told["training.steps"][0] == "left"


def test_a_configuration_that_calls_another_file_keeps_what_can_be_read(tmp_path):
    (tmp_path / "a.py").write_text(
        "def base() -> Trainer.Config:\n"
        "    return _OwnTrainerConfig(parallelism=P(tensor_parallel_degree=8))\n"
        "def mine() -> Trainer.Config:\n"
        "    config = tuned(base())\n"
        "    return config\n"
    )
    result = import_plan(f"{tmp_path}/a.py:mine", Sink(), peer=None, model="llama-3.1-8b")
    assert "override tp = 8" in result.text
    lost = [leaf.path for leaf, kind, _ in result.fate if kind == "lost"]
    assert lost == ["statement config = tuned(base())"]


def test_one_rule_of_a_configuration_is_added_to_the_plan(tmp_path):
    """A DistributedConfig's `tp_plan` changes single rules of the model's own."""
    (tmp_path / "a.json").write_text('{"tp_size": 2, "tp_plan": {"lm_head": "colwise_rep"}}')
    result = import_plan(str(tmp_path / "a.json"), Sink(), peer=None, model="llama-3.1-8b")
    text = " ".join(result.text.split())
    assert "lm_head : colwise(-> replicate)" in text
    assert "$blocks.self_attn.q_proj : colwise" in text  # which the file does not have


@pytest.mark.parametrize(
    ("model_type", "rule", "written"),
    [
        ("gpt_neox", "layers.*.attention.dense", "$blocks.attention.dense :"),
        ("ministral", "layers.*.self_attn.o_proj", "plan a for ministral"),
        ("minimax_m2", "layers.*.self_attn.o_proj", "plan a for minimax_m2"),
    ],
)
def test_a_model_type_is_exact(model_type, rule, written, tmp_path):
    values = {"model_type": model_type, "base_model_tp_plan": {rule: "rowwise"}, "tp_size": 2}
    (tmp_path / "a.json").write_text(json.dumps(values))
    result = import_plan(str(tmp_path / "a.json"), Sink(), peer=None, model=None)
    assert written in result.text and "is a guess" not in result.text


@pytest.mark.parametrize(
    ("function", "model", "flavor"),
    [
        ("llama3_8b_wide", "llama3", "8B"),
        ("deepseek_v3_671b", "deepseek_v3", None),
        ("gpt_oss_20b", "gpt_oss", None),
        ("sft_qwen3_8b_math", "sft_qwen3_8b_math", "8B"),
    ],
)
def test_functions_name_their_models(function, model, flavor):
    named = named_by(function, flavor)
    assert named[0] == model
    family, _ = family_of(*named, None)
    assert family and family.replace("_", "") in function.replace("_", "")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen/QwQ-32B", "qwen2"),
        ("CohereLabs/c4ai-command-r7b-12-2024", "cohere2"),
        ("ByteDance-Seed/Seed-Coder-8B-Instruct", "llama"),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "WanTransformer3DModel"),
        ("black-forest-labs/FLUX.1-dev", "FluxTransformer2DModel"),
        ("black-forest-labs/FLUX.2-dev", None),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h"),
        ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", "llama"),
        ("baidu/ERNIE-4.5-21B-A3B-PT", "ernie4_5_moe"),
        ("google/gemma-4-31B-it", "gemma4"),
        ("MiniMaxAI/MiniMax-M2", "minimax_m2"),
        ("tiiuae/Falcon3-7B-Base", "llama"),
    ],
)
def test_names_without_their_family(name, family):
    assert family_of(name, None, None)[0] == family


def test_text_of_a_stranger_stays_in_comments(tmp_path):
    """Keys and values with line ends or colors cannot become lines of the plan."""
    key = "x\\nmesh {\\n    tp = 64\\n}\\u001b[31m"
    (tmp_path / "a.yaml").write_text(f'base_model: x\nadapter: "lora\\n}}"\n"{key}": 1\n')
    result = import_plan(str(tmp_path / "a.yaml"), Sink(), peer=None, model="llama-3.1-8b")
    assert "\x1b" not in result.text
    assert not [line for line in result.text.splitlines() if "tp = 64" in line and line[0] != "#"]


def test_broken_files_end_without_a_traceback(tmp_path):
    chance = random.Random(7)
    for name in sorted({name.partition(":")[0] for name in FILES}):
        for _ in range(12):
            text = list((FOLDER / name).read_text())
            for _ in range(chance.randint(1, 8)):
                at = chance.randrange(len(text))
                text[at : at + chance.randint(0, 3)] = chance.choice(
                    ["", "{", ":", "\n", "&a", "-"]
                )
            (tmp_path / name).write_text("".join(text))
            code, _, errors = call("import", tmp_path / name, "--model", "llama-3.1-8b")
            assert code in (0, 1, 2) and "PL900" not in errors, ("".join(text), errors)


@pytest.mark.parametrize(
    ("model", "plan"),
    [("llama-3.1-8b", "llama"), ("mixtral-8x7b", "mixtral"), ("qwen3-8b", "qwen3")],
)
def test_tp_plan_is_that_of_transformers(model, plan):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    words = ("--world-size", 8, "--set", "tp=4", "--set", "sequence=false")
    code, text, errors = call("lower", model, plan, *words, "--format", "tp-plan")
    assert code == 0 and "a `tp_plan` does not have `fsdp`" in errors
    written = json.loads(text)
    own = {f"model.{k}": v for k, v in CONFIG_MAPPING[plan].base_model_tp_plan.items()}
    assert own.items() <= written.items()
    assert written.keys() - own.keys() <= {"model.embed_tokens", "lm_head", "model.norm"}


def test_a_tp_plan_comes_back(tmp_path):
    """What `lower` writes and `import` reads lowers to the same tensor parallelism."""
    words = ("--world-size", 8, "--set", "tp=4", "--set", "sequence=false")
    _, text, _ = call("lower", "mixtral-8x7b", "mixtral", *words, "--format", "tp-plan")
    (tmp_path / "a.json").write_text(json.dumps({"tp_plan": json.loads(text), "tp_size": 4}))
    result = import_plan(str(tmp_path / "a.json"), Sink(), peer=None, model="mixtral-8x7b")
    (tmp_path / "a.plan").write_text(result.text)
    ways = [("mixtral", *words), (tmp_path / "a.plan", *words)]
    tensor = []
    for way in ways:
        _, text, _ = call("lower", "mixtral-8x7b", *way, "--format", "json")
        ops = json.loads(text)["stages"][0]["ops"]
        # transformers' linears sum their gradients themselves, planc sums a module's once
        styles = ((o["modules"], o["style"]) for o in ops if "style" in o)
        tensor.append([one for one in styles if one[1]["name"] != "input"])
    assert sorted(map(str, tensor[0])) == sorted(map(str, tensor[1])) and tensor[0]


@pytest.mark.parametrize("family", ["nemotron-nas", 'a"b'])
def test_a_family_that_is_no_name_is_quoted(tmp_path, family):
    """`nemotron-nas` is the type of NVIDIA's Llama 3.3 Nemotron Super, in AutoModel's recipes."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    result, sink = run("deepspeed.json", model=str(tmp_path))
    assert not sink.has_errors
    [header] = [line for line in result.text.splitlines() if line.startswith("plan ")]
    assert header == f"plan deepspeed for {json.dumps(family)}"
    parsed = parse(Source("imported.plan", result.text), sink)
    assert not sink.has_errors and [n.path for n in parsed.statements[0].families] == [family]


@pytest.mark.parametrize(("enabled", "lost"), [(True, True), (False, False)])
def test_a_dynamic_scale_is_not_off(enabled, lost, tmp_path):
    """DeepSpeed's 0 is a scale that changes."""
    half = {"enabled": enabled, "loss_scale": 0, "hysteresis": 2}
    text = json.dumps({"zero_optimization": {"stage": 3}, "fp16": half})
    (tmp_path / "ds.json").write_text(text)
    result, sink = run(str(tmp_path / "ds.json"), model="llama-3.1-8b")
    named = [d.message for d in sink if d.code == "PL736" and "loss_scale" in d.message]
    assert bool(named) is lost
    assert ("PL570" in result.text) is lost


LINEAR = "$blocks.**<Linear>"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("axolotl_fp8.yaml", [f"{LINEAR} : fp8(recipe = tensorwise, gather = fp8)"]),
        ("accelerate_fp8.yaml", [f"{LINEAR} : fp8(recipe = tensorwise, gather = fp8)"]),
        (
            "torchtitan_fp8.toml",
            [
                f"{LINEAR} : fp8(recipe = rowwise)",
                "override $blocks.self_attn.k_proj : none",
                "override $blocks.self_attn.v_proj : none",
            ],
        ),
    ],
)
def test_products_in_8_bits(name, lines):
    """By torchao's recipes, with the layers that the file leaves out."""
    text = re.sub(" +", " ", run(name)[0].text)
    section = text.partition("matmul {")[2].partition("}\n\n")[0]
    found = [line.partition(" #")[0].strip() for line in section.splitlines()]
    assert [line for line in found if " : " in line and line[0] != "#"] == lines


@pytest.mark.parametrize(
    ("name", "before", "after", "kind"),
    [
        ("accelerate_fp8.yaml", "backend: AO", "backend: TE", "lost"),
        ("axolotl_fp8.yaml", "fp8: true", "fp8: true\nadapter: lora", "lost"),
        ("axolotl_fp8.yaml", "fp8: true", "fp8: false", "same"),
        ("torchtitan_fp8.toml", '"rowwise"', '"rowwise_with_gw_hp"', "lost"),
        ("torchtitan_fp8.toml", 'linear.float8"]', 'linear.mx"]', "lost"),
    ],
)
def test_products_that_no_plan_has(name, before, after, kind, tmp_path):
    """They are named with a reason, and no section is written."""
    text = (FOLDER / name).read_text()
    assert before in text
    (tmp_path / name).write_text(text.replace(before, after))
    result = import_plan(str(tmp_path / name), Sink(), peer=None, model="llama-3.1-8b")
    assert "matmul {" not in result.text
    kinds = {fate for leaf, fate, _ in result.fate if "fp8" in leaf.path or "float8" in leaf.path}
    assert kind in kinds and "plan" not in kinds


def test_filters_of_other_names_are_left(tmp_path):
    text = (FOLDER / "torchtitan_fp8.toml").read_text()
    path = tmp_path / "a.toml"
    path.write_text(text.replace("attention.wk", "auto_filter_small_kn"))
    result = import_plan(str(path), Sink(), peer=None, model="llama-3.1-8b")
    found = {leaf.path: fate for leaf, fate, _ in result.fate}
    assert found["quantize.linear.float8.filter_fqns"] == "lost"
    assert f"{LINEAR} : fp8(recipe = rowwise)" in result.text
