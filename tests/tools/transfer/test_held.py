"""The slices that ranks hold by a plan's lines are those that `apply` makes."""

import pytest
import torch
from tiny_engines import LLAMA, MIXTURE, SIZES, facts_of
from transformers import AutoConfig, AutoModelForCausalLM

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.ops.document import digest
from planc.runtime.executor import apply_lowered
from planc.runtime.transfer import _local_faults
from planc.simulate.thread_ranks import run_alone
from planc.tools.transfer.held import training_side

TIED = {**LLAMA, "tie_word_embeddings": True}
PHI3 = {**SIZES, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
PHI3 |= {"num_key_value_heads": 8}
QWEN3 = {**SIZES, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_head": 8,
    "n_layer": 2,
    "n_positions": 64,
    "vocab_size": 132,
}
CASES = {
    "tp 2, fsdp 2": (LLAMA, 4, ["tp=2"]),
    "uneven fsdp 3": (LLAMA, 3, []),
    "uneven fsdp 3 on tp 2": (LLAMA, 6, ["tp=2"]),
    "cp 2, fsdp 2": (LLAMA, 4, ["cp=2"]),
    "pp 2, fsdp 2": (LLAMA, 4, ["pp=2", "microbatches=2"]),
    "tied, pp 2, fsdp 2": (TIED, 4, ["pp=2", "microbatches=2"]),
    "replicas": (QWEN3, 8, ["tp=2", "dp_replicate=2"]),
    "ep 2, fsdp 2": (MIXTURE, 4, ["ep=2"]),
    "ep 2 in tp 2": (MIXTURE, 4, ["tp=2", "ep=2"]),
    "ep 4 over tp 2": (MIXTURE, 8, ["tp=2", "ep=4"]),
    "etp": (MIXTURE, 4, ["tp=2", "ep=2", "etp=2"]),
    "packed projections": (PHI3, 4, ["tp=2"]),
    "Conv1D": (GPT2, 4, ["tp=2"]),
}


def on_meta(config):
    values = {k: v for k, v in config.items() if k != "model_type"}
    with torch.device("meta"):
        config = AutoConfig.for_model(config["model_type"], **values)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_the_slices_of_the_plan(case):
    config, world, sets = CASES[case]
    sink, facts = Sink(), facts_of(config)
    sets = [*sets, "recompute=false"]
    done = compile_plan(facts, None, sink, world_size=world, settings=sets)
    assert not sink.has_errors, [*sink]
    side = training_side(done.plan, facts)
    assert side.size == world
    faults = {}
    for rank in range(world):

        def program(_, rank=rank):
            run = apply_lowered(
                on_meta(config), done.lowered, digest=digest(done.lowered), device_type="cpu",
                compare=0, require="nothing",
            )  # fmt: skip
            wanted = side.tensors_of(rank)
            faults[rank] = _local_faults(run.model, wanted)
            if rank == 0:
                name = "model.norm.weight" if "model.norm.weight" in wanted else next(iter(wanted))
                other = {name: side.tensors_of(world - 1).get(name)}
                if other[name] is not None and other[name].ranges != wanted[name].ranges:
                    assert _local_faults(run.model, other)

        assert run_alone(world, program, seconds=60, rank=rank) is None
    assert faults == dict.fromkeys(range(world), "")
