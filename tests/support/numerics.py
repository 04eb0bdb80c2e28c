"""A parallel plan is right when logits, loss and every gradient equal the single process.

These functions run on every rank of a pool. The errors that they give are relative: the largest
absolute difference of a tensor over the largest absolute value of the right one.
"""

import contextlib
import hashlib
import re
from unittest import mock
from zlib import crc32

import torch
import transformers
from families import COMMON, FAMILIES
from peft import LoraConfig, inject_adapter_in_model
from torch import distributed
from torch.distributed.tensor import DTensor

import planc
from planc.model.config import is_diffusers
from planc.ops.tensor_parallel import Parallelize
from planc.proxy.input_search import rank_slice
from planc.proxy.transformers_model import TransformersBuilder, add_denoising_loss
from planc.runtime.standalone.shards import in_own_order, rank_orders
from planc.sections.draws.ops import DrawByRank, SyncRng
from planc.simulate.program import limit_whole_rows
from planc.simulate.random_numbers import Recorded, Replayed

LENGTH, BATCH = 16, 4

MODELS = {
    "llama": dict(model_type="llama", **COMMON),
    "llama-tied": dict(model_type="llama", tie_word_embeddings=True, **COMMON),
    "mistral": dict(model_type="mistral", sliding_window=8, **COMMON),
    "qwen2": dict(model_type="qwen2", **COMMON),
    "qwen2-tied": dict(model_type="qwen2", tie_word_embeddings=True, **COMMON),
    "qwen3": dict(model_type="qwen3", head_dim=16, **COMMON),
    "gemma3": dict(
        model_type="gemma3_text",
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
        **COMMON,
    ),
    "phi3": dict(model_type="phi3", pad_token_id=None, bos_token_id=1, eos_token_id=2, **COMMON),
    "gpt2": dict(
        model_type="gpt2",
        vocab_size=128,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    **FAMILIES,
}


def build(model, **changes):
    """A small model with weights that are nowhere 0 or 1, the same on every rank."""
    return build_values({**values_of(model), **changes})


def values_of(model):
    """The configuration of a name of `MODELS`, or a small one of a shipped model of diffusers."""
    if model in MODELS:
        return MODELS[model]
    from planc.diagnostics.diagnostic import Sink
    from planc.model.load import load
    from planc.proxy.shrink import shrink

    return shrink(load(model, Sink()).config, ranks=2).values


def build_values(values):
    """The same for the fields of a configuration."""
    if is_diffusers(values):
        from planc.proxy.diffusers_model import DiffusersBuilder

        return DiffusersBuilder(values).build(0)
    config = transformers.AutoConfig.for_model(**values)
    torch.manual_seed(0)
    made = class_of(config)._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    made = made.float().train()
    add_denoising_loss(made)
    return made


def inject(model, pattern, seed, **config):
    """peft's adapters on the layers that a pattern matches, each with a seed made of its name."""
    for name in [n for n, _ in model.named_modules() if re.fullmatch(pattern, n)]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((seed << 32) + crc32(name.encode()))
            one = LoraConfig(target_modules=re.escape(name), **config)
            inject_adapter_in_model(one, model)


def class_of(config):
    """The class that `architectures` names, else the family's causal language model."""
    if config.architectures:
        return getattr(transformers, config.architectures[0])
    return transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def data(vocabulary, seed=3):
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, LENGTH)
    tokens = torch.randint(1, vocabulary, shape, generator=generator)
    labels = torch.randint(1, vocabulary, shape, generator=generator)
    return tokens, labels


def sample(config):
    """What a model is run on, by the names of its arguments."""
    text = config.get_text_config()
    tokens, labels = data(text.vocab_size)
    if "Classification" in class_of(config).__name__:
        return {"input_ids": tokens, "labels": labels[:, 0] % config.num_labels}
    if not hasattr(config, "vision_config") or config.model_type == "diffusion_gemma":
        return {"input_ids": tokens, "labels": labels}
    return TransformersBuilder(config.to_dict()).sample()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def error(mine, right, least=1e-12):
    """The error relative to the right tensor, or to `least` where that is all but 0."""
    difference = (whole(mine).float() - right.float()).abs().max()
    return (difference / right.abs().max().clamp_min(least)).item()


def plain(name):
    """A parameter's name without what wrapping added."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def compare(model, plan, overrides=(), changes=None, script=False, without=None, seed=None):
    """How far a parallel model is from the single process, on this rank.

    Args:
        model: a name of `MODELS`.
        plan: a lowered plan, or what `planc.lower` takes.
        overrides: settings of a plan that is not lowered.
        changes: configuration fields that differ from those of `MODELS`.
        script: whether the emitted Python spreads the model, instead of planc's own apply.
        without: leave out the operations on modules of this name, to break the plan on purpose;
            `draw`, those that let ranks draw alike; `draw_by_rank`, those that let them differ.
        seed: of what the first rank draws in training; the next ones have the next numbers. The
            single process uses again what the ranks have drawn.

    Returns:
        Relative errors of `logits`, `loss` and the worst `gradient`, whose name is `worst`;
        `bits`, a digest of all of this rank's numbers; and `unlike`, how its random numbers differ
        from those of one process.
    """
    single = build(model, **(changes or {}))
    inputs = sample(single.config)
    parallel = build(model, **(changes or {}))
    if isinstance(plan, str):
        world = distributed.get_world_size()
        plan = planc.lower(parallel, plan, world_size=world, overrides=overrides)
    if without:
        kept = tuple(op for op in plan.ops if not names(op, without))
        assert len(kept) < len(plan.ops), f"nothing is named {without}"
        plan = plan.map_ops(lambda _: kept)
    if seed is not None:
        torch.manual_seed(seed + distributed.get_rank())
    limit_whole_rows(single, plan.ops)
    rank, size = (by_script if script else by_planc)(parallel, plan)
    rows = BATCH // size
    mine = slice(rank * rows, (rank + 1) * rows)
    with Recorded() as recorded:
        output = parallel(**rank_slice(inputs, rank, size))
    output.loss.backward()
    drawn = [None] * distributed.get_world_size()
    distributed.all_gather_object(drawn, recorded.drawn)
    assert size == 1 or not any(drawn)  # ranks with other rows draw for those
    with Replayed(drawn, lambda: ("", "")) as replayed:
        right = single(**inputs, use_cache=False)
    right.loss.backward()
    loss = whole(output.loss).clone()
    distributed.all_reduce(loss)  # ranks with the same data have the same loss
    loss /= distributed.get_world_size()
    # a tower for images has no gradient where there is none
    parameters = single.named_parameters()
    reference = {name: p.grad for name, p in parameters if p.grad is not None}
    gradients = gradients_of(parallel, reference)
    assert gradients.keys() == reference.keys()
    # Some gradients are 0 but for rounding: a key's bias does nothing behind a softmax.
    least = 1e-3 * max(grad.abs().max().item() for grad in reference.values())
    errors = {name: error(grad, reference[name], least) for name, grad in gradients.items()}
    worst = max(errors, key=errors.get)
    logits = output.get("logits")
    if logits is None:  # a loss section computes none where there are labels
        unlabeled = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.no_grad():
            logits = parallel(**rank_slice(unlabeled, rank, size)).logits
    return {
        "logits": error(logits, right.logits[mine].detach()),
        "loss": error(loss, right.loss.detach()),
        "gradient": errors[worst],
        "worst": worst,
        "bits": bits(logits, loss, *gradients.values()),
        "unlike": sorted({one.problem for one in replayed.different_draws}),
    }


def lowered(model, document):
    """Errors of a lowered plan, given as JSON, whatever the checks say of it."""
    from planc.diagnostics.diagnostic import Sink
    from planc.ops.document import loads

    plan = loads(document, "mutant", Sink())
    return compare(model, plan)


def names(op, last):
    """Whether an operation gives a style to modules of a name, or is of that name itself."""
    if isinstance(op, SyncRng):
        return last == "draw"
    if isinstance(op, DrawByRank):
        return last == "draw_by_rank"
    return isinstance(op, Parallelize) and str(op.modules).endswith(last)


def gradients_of(model, wanted=None):
    """Whole gradients by the names that parameters had before anything was wrapped.

    Args:
        model: the parallel model.
        wanted: the parameters that have to have one; all that are trained by default.
    """
    gradients, own = {}, rank_orders(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = parameter.grad
        if wanted is not None and grad is None and plain(name) not in wanted:
            continue
        assert grad is not None, f"{name} has no gradient"
        partial = isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)
        assert not partial, f"the gradient of {name} is a part of a sum"
        gradients[plain(name)] = in_own_order(whole(grad), own.get(plain(name)))
    return gradients


def bits(*tensors):
    """A digest of the bits of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(whole(tensor).flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def by_planc(model, lowered):
    """planc's own apply; gives the data rank and size."""
    with quick_compile():
        run = planc.apply(model, lowered, device_type="cpu")
    return run.data_rank, run.data_size


def by_script(model, lowered):
    """The emitted Python instead; gives the data rank and size."""
    return emitted(model, lowered)[:2]


def emitted(model, lowered):
    """The emitted Python; gives the data rank and size, and its names."""
    from planc.emit.python.script import render

    names = {}
    exec(compile(render(lowered, digest="0" * 64), "emitted.py", "exec"), names)
    homes = {getattr(value, "__module__", None) or "" for value in names.values()}
    assert not [home for home in homes if home.startswith("planc")], "the script needs planc"
    mesh = names["build_mesh"]("cpu")
    with quick_compile():
        assert names["parallelize"](model, mesh) is model
    rank, size = 0, 1
    for axis in lowered.axes:
        if axis.name in lowered.data:
            rank = rank * axis.size + mesh[axis.name].get_local_rank()
            size *= axis.size
    return rank, size, names


BACKEND = "aot_eager"


@contextlib.contextmanager
def quick_compile():
    """`module.compile()` traces forward and backward, and leaves out the C++ compiler."""
    torch._dynamo.reset()
    real = torch.nn.Module.compile

    def traced(module, **arguments):
        real(module, backend=BACKEND, **arguments)

    with mock.patch.object(torch.nn.Module, "compile", traced):
        yield
