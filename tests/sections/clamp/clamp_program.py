"""Uses the section `clamp` by each command and on two ranks; prints the results as JSON."""

import copy
import json
from pathlib import Path

import torch
from console import call
from loop_plans import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

import planc
from planc.ops.document import digest
from planc.ops.lowered import Lowered
from planc.runtime.executor import apply_for_reference, apply_lowered
from planc.simulate.thread_ranks import run_ranks
from planc.tools.editor.completion import complete
from planc.tools.editor.hover import meanings
from planc.tools.editor.judge import judge

MOST = 0.01
OPTIONS = ("--world-size", "8", "--set", "tp=2")


def plan(name, section):
    """Writes a plan that extends llama by a section, and returns its name."""
    Path(name).write_text(
        f'plan clamped for any\n\nextend "llama"\n\nclamp {{\n    {section}\n}}\n'
    )
    return name


def commands():
    """The output of each command, by name."""
    target = ("llama-3.2-1b", plan("clamped.plan", f"$blocks.mlp : outputs(most = {MOST})"))
    wider = plan("wider.plan", "$blocks.mlp : outputs(most = 0.02)")
    lists = plan("lists.plan", "model.layers : outputs(most = 1)")
    typo = plan("typo.plan", "$blocks.mlp : outputs(mst = 1)")
    setting = plan("setting.plan", "most = 1")
    done = {
        "check": call("check", *target, *OPTIONS),
        "list": call("check", target[0], lists, *OPTIONS, "--level", "structure"),
        "typo": call("check", target[0], typo, *OPTIONS, "--level", "structure"),
        "setting": call("check", target[0], setting, *OPTIONS, "--level", "structure"),
        "lower": call("lower", *target, *OPTIONS),
        "json": call("lower", *target, *OPTIONS, "--format", "json"),
        "python": call("lower", *target, *OPTIONS, "--format", "python"),
        "why": call("why", target[0], target[1], "model.layers.3.mlp", *OPTIONS),
        "why json": call("why", *target, "model.layers.3.mlp", *OPTIONS, "--format", "json"),
        "estimate": call("estimate", *target, *OPTIONS, "--batch", "8", "--seq", "512"),
        "fmt": call("fmt", target[1], "--diff"),
    }
    Path("clamped.json").write_text(done["json"][1])
    done["read"] = call("lower", "llama-3.2-1b", "clamped.json")
    done["diff"] = call("diff", *target, wider, *OPTIONS)
    return {name: [code, text + errors] for name, (code, text, errors) in done.items()}


def outputs(model):
    """The logits of a model for fixed tokens, after a backward pass."""
    tokens = torch.arange(1, 65).reshape(4, 16)
    result = model(input_ids=tokens, labels=tokens)
    result.loss.backward()
    return result.logits.detach()


def ranks():
    """The largest differences of logits: of two ranks, and of a model without the section."""
    torch.manual_seed(0)
    models = [LlamaForCausalLM(LlamaConfig(**SIZES))]
    models += [copy.deepcopy(models[0]) for _ in range(3)]
    settings = ["tp=2", "param_dtype=fp32"]
    lowered: Lowered = planc.lower(models[0], "clamped.plan", world_size=2, overrides=settings)
    right, plain = outputs(apply_for_reference(models[2], lowered)), outputs(models[3])
    logits = {}

    def rank(number):
        run = apply_lowered(models[number], lowered, digest=digest(lowered), device_type="cpu")
        logits[number] = outputs(run.model)

    assert run_ranks(2, rank, seconds=120) is None
    wrong = max((logits[n] - right).abs().max().item() for n in range(2))
    return {"wrong": wrong, "effect": (plain - right).abs().max().item()}


def editor():
    """The words of the section, and those that an editor completes at the top of a plan."""
    text = "plan p for llama\n\ncl"
    path = Path("p.plan")
    items = complete(judge(path, {str(path.resolve()): text}), len(text))[1]
    return {"words": meanings("clamp", "actions"), "top": [word for word, *_ in items]}


if __name__ == "__main__":
    print(json.dumps({**commands(), "ranks": ranks(), "editor": editor(), "file": planc.__file__}))
