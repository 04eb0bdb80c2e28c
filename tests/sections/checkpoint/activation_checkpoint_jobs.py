"""What checkpointing computes again and what it keeps, counted on every rank of a pool."""

import gc
import re
from unittest import mock

import numerics
import torch
import transformers
from numerics import MODELS, build, data, quick_compile, sample
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import planc
from planc.runtime import preconditions
from planc.runtime.standalone import activation_checkpoint


class Counting(TorchDispatchMode):
    """Counts the calls of some operators."""

    def __init__(self, names):
        super().__init__()
        self.names, self.count = names, 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.count += str(func) in self.names
        return func(*args, **(kwargs or {}))


def applied(model, plan, overrides, attention):
    made = build(model)
    if attention:
        made.set_attn_implementation(attention)
    with quick_compile():
        run = planc.apply(made, plan, overrides=overrides, device_type="cpu")
    tokens, labels = data(made.config.vocab_size)
    rows = len(tokens) // run.data_size
    mine = slice(run.data_rank * rows, (run.data_rank + 1) * rows)
    return made, tokens[mine], labels[mine]


def partitioned(plan):
    """What apply says of a compiled plan, and what the first step raises where it says nothing.

    The backend partitions the graph as torch's default does, and leaves out the C++ compiler.
    """

    def step():
        made, tokens, labels = applied("llama", plan, ["tp=2"], "sdpa")
        made(input_ids=tokens, labels=labels).loss.backward()

    with mock.patch.object(numerics, "BACKEND", "aot_eager_decomp_partition"):
        refused = said(step)
        with mock.patch.object(preconditions, "require_recomputable", lambda *_: None):
            return refused, said(step) if refused else ""


def said(call):
    """The exception that a call raises, as text."""
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def counted(plan, names, model="llama", overrides=(), attention=None):
    """Calls of operators in the forward and in the backward pass.

    DTensors answer for themselves, so a count is of what each rank computes once a call.
    """
    made, tokens, labels = applied(model, plan, overrides, attention)
    with Counting(names) as forward:
        loss = made(input_ids=tokens, labels=labels).loss
    with Counting(names) as backward:
        loss.backward()
    return forward.count, backward.count


def kept(plan, model="llama", overrides=(), attention=None):
    """Bytes of tensors that a forward pass leaves for the backward pass."""
    made, tokens, labels = applied(model, plan, overrides, attention)
    made(input_ids=tokens, labels=labels).loss.backward()  # FSDP makes room once, at first
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = made(input_ids=tokens, labels=labels)
        loss = output.loss
        del output
        gc.collect()
    events = profiler.profiler.kineto_results.events()
    assert loss.requires_grad
    return sum(e.nbytes() for e in events if e.name() == "[memory]")


def parked(plan, overrides=()):
    """How many tensors went to the CPU in forward, how many came back, and their bytes."""
    made, tokens, labels = applied("llama", plan, overrides, None)
    gone, back = [], []
    real = activation_checkpoint._Parked

    class Watched(real):
        def __init__(self, tensor, pin):
            super().__init__(tensor, pin)
            assert self.held.device.type == "cpu" and self.held is not tensor
            gone.append(self.held.numel() * self.held.element_size())

        def back(self):
            back.append(self.held.numel() * self.held.element_size())
            return super().back()

    with mock.patch.object(activation_checkpoint, "_Parked", Watched):
        loss = made(input_ids=tokens, labels=labels).loss
        assert not back
        loss.backward()
    return sorted(gone), sorted(back)


def again(plan):
    """Backward twice through one graph gives the gradients twice."""
    made, tokens, labels = applied("llama", plan, (), None)
    loss = made(input_ids=tokens, labels=labels).loss
    loss.backward(retain_graph=True)
    once = [p.grad.full_tensor().clone() for p in made.parameters()]
    loss.backward()
    return all(
        torch.equal(p.grad.full_tensor(), 2 * g)
        for p, g in zip(made.parameters(), once, strict=True)
    )


def dropped(plan, p=0.5):
    """Whether gradients of a model with dropout are those of the same seed without checkpoints."""
    grads = []
    for name in (plan, None):
        config = transformers.AutoConfig.for_model("llama", **SMALL, attention_dropout=p)
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        made.train()
        if name:
            planc.apply(made, name, device_type="cpu")
        tokens, labels = data(made.config.vocab_size)
        torch.manual_seed(7)
        made(input_ids=tokens, labels=labels).loss.backward()
        grads.append([g.full_tensor() if name else g for g in (p.grad for p in made.parameters())])
    return max(float((a - b).abs().max()) for a, b in zip(*grads, strict=True))


SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# Blocks that are not all alike -------------------------------------------------------------------

MODELS["gemma3n"] = dict(
    model_type="gemma3n_text",
    vocab_size=128,
    vocab_size_per_layer_input=128,
    hidden_size=64,
    hidden_size_per_layer_input=16,
    intermediate_size=96,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_kv_shared_layers=2,
    laurel_rank=8,
    activation_sparsity_pattern=[0.0] * 6,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    sliding_window=8,
    altup_num_inputs=2,
    pad_token_id=0,
)
MODELS["lfm2"] = dict(
    model_type="lfm2",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    layer_types=["conv", "full_attention"] * 2,
    pad_token_id=0,
)
MODELS["zamba2"] = dict(
    model_type="zamba2",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=4,
    attention_head_dim=32,
    n_mamba_heads=8,
    mamba_d_state=16,
    mamba_ngroups=1,
    mamba_headdim=16,
    num_mem_blocks=2,
    hybrid_layer_ids=[1, 3, 5, 7],
    layers_block_type=["mamba", "hybrid"] * 4,
    adapter_rank=4,
    chunk_size=8,
    max_position_embeddings=64,
)
MODELS["gemma4-shared"] = dict(
    model_type="gemma4_text",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    head_dim=16,
    global_head_dim=32,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 3,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=128,
    num_kv_shared_layers=2,
    pad_token_id=0,
)


def compare(**arguments):
    """`numerics.compare` with the models above among the names."""
    return numerics.compare(**arguments)


def twice(model, plan, scope):
    """The layers of all towers that run a second time, for the backward pass."""
    made = build(model)
    run = planc.apply(made, plan, device_type="cpu")
    counts = {}
    layers = re.compile(r"(.*\.layers\.\d+)(\._checkpoint_wrapped_module)?")
    for name, module in made.named_modules():
        found = layers.fullmatch(name)
        if found and not hasattr(module, "_checkpoint_wrapped_module"):
            plain = found[1].replace("._checkpoint_wrapped_module", "")
            module.register_forward_pre_hook(
                lambda *_, name=plain: counts.update({name: counts.get(name, 0) + 1})
            )
    inputs = sample(made.config)
    rows = len(inputs["input_ids"]) // run.data_size
    mine = slice(run.data_rank * rows, (run.data_rank + 1) * rows)
    made(**{name: value[mine] for name, value in inputs.items()}).loss.backward()
    assert len(counts) == 4 and any(name.startswith(scope) for name in counts)
    return {name for name, count in counts.items() if count == 2}
