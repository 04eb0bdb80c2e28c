"""What test_scalars runs on every rank: CLIP, whose `logit_scale` has no dims."""

from pathlib import Path

import torch
import transformers
from numerics import error
from torch import distributed

import planc
from planc.emit.python.script import render
from planc.runtime.standalone.safetensors_files import tensors_in_file
from planc.runtime.weights.peft_files import WEIGHTS

WIDTHS = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
TEXT = dict(vocab_size=128, max_position_embeddings=16, eos_token_id=127, **WIDTHS)
VISION = dict(image_size=16, patch_size=8, **WIDTHS)
ROWS = 4


def built(seed):
    torch.manual_seed(seed)
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)
    model = transformers.CLIPModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, 127, (ROWS, 12), generator=generator)
    return tokens, torch.randn(ROWS, 3, 16, 16, generator=generator)


def trained(model, rank=0, ranks=1):
    """The gradients of the last of two steps of SGD; the loss is a mean over rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = ROWS // ranks
    for step in range(2):
        optimizer.zero_grad()
        tokens, images = (part[rank * rows :][:rows] for part in batch(step))
        out = model(input_ids=tokens, pixel_values=images)
        similar = out.logits_per_text.diagonal()  # times the scalar, in the model's forward
        (similar.tanh() + similar.sin()).mean().backward()
        optimizer.step()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def largest(mine, right):
    assert mine.keys() == right.keys(), mine.keys() ^ right.keys()
    assert all(mine[n].shape == right[n].shape for n in right)
    return max(error(mine[n], right[n]) for n in right)


def emitted(plan, overrides):
    """Whether the emitted script makes the gradients that `apply` makes, bit for bit."""
    run = planc.apply(built(1), plan, overrides=overrides)
    right = trained(run.model, run.data_rank, run.data_size)
    space = {}
    exec(render(run.lowered, digest=run.digest), space)
    model = built(1)
    space["parallelize"](model, space["build_mesh"]("cpu"))
    mine = trained(model, run.data_rank, run.data_size)
    return all(torch.equal(mine[n].to_local(), right[n].to_local()) for n in right)


def all_ways(plan, folder, overrides):
    """The errors of weights after two steps, by how they are read, and the scalar's gradient."""
    right = built(1)
    gradient = trained(right)["logit_scale"]
    right = {n: t.detach() for n, t in right.state_dict().items()}
    run = planc.apply(built(1), plan, overrides=overrides)
    own = trained(run.model, run.data_rank, run.data_size)["logit_scale"].full_tensor()
    found = {"gradient": float((own - gradient).abs() / gradient.abs())}
    found["full"] = largest(run.full_state_dict(every_rank=True), right)
    run.export(f"{folder}/hub")
    run.save(f"{folder}/saved")
    distributed.barrier()
    read = transformers.CLIPModel.from_pretrained(f"{folder}/hub")
    found["hub"] = largest(dict(read.state_dict()), right)
    for name, mode in (("hub", "rank0"), ("hub", "slices"), ("saved", "slices")):
        text = f'plan read for clip\nextend "{plan}"\nload {{\n    weights = {mode}\n}}\n'
        path = f"{folder}/{mode}-{distributed.get_rank()}.plan"
        Path(path).write_text(text)
        again = planc.apply(built(2), path, overrides=overrides)
        again.load(f"{folder}/{name}")
        found[f"{name} {mode}"] = largest(again.full_state_dict(every_rank=True), right)
    return found


TUNED = """plan tuned for clip

extend "{plan}"

adapters {{
    text_model.encoder.layers.*.self_attn.q_proj : lora(rank = 2)
}}

train {{
    visual_projection : trainable
}}
"""


def beside_adapters(plan, folder, own):
    """The shape of a scalar in an adapter file, its value after loading it, and what is raised;
    `own` lets the model's own scalar train too.
    """
    path = Path(f"{folder}/tuned-{distributed.get_rank()}.plan")
    path.write_text(TUNED.format(plan=plan))
    values = []
    for seed in (1, 2):
        model = built(seed)
        scale = torch.nn.Parameter(torch.tensor(float(seed)))
        model.visual_projection.register_parameter("scale", scale)
        run = planc.apply(model, path, overrides=["param_dtype=fp32", "reduce_dtype=fp32"])
        run.model.logit_scale.requires_grad_(own)
        try:
            (run.save_adapters if seed == 1 else run.load_adapters)(f"{folder}/tuned")
        except planc.PlanError as error:
            return (), 0.0, str(error)
        values.append(run.full_state_dict(every_rank=True)["visual_projection.scale"])
    [entry] = [
        t for t in tensors_in_file(Path(f"{folder}/tuned/{WEIGHTS}")) if t.name.endswith(".scale")
    ]
    return entry.shape, float(values[1]), ""
