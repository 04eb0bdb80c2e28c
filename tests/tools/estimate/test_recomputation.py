"""What a checkpoint repeats: torch stops at the last tensor that backward needs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.tools.estimate.answer import Request, answer_for
from planc.tools.estimate.from_plan import Batch
from planc.tools.estimate.step_time import Passes


class Products(TorchDispatchMode):
    """Counts the products that run."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_torch_does_not_repeat_the_last_product():
    config = LlamaConfig(
        hidden_size=8, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2
    )
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0)
    states = torch.randn(1, 4, 8, requires_grad=True)
    angles = torch.ones(1, 4, 4), torch.zeros(1, 4, 4)
    output = checkpoint(layer, states, position_embeddings=angles, use_reentrant=False)
    with Products() as products:
        output.sum().backward()
    assert products.count == 2 * 7 + 7 - 1


def passes(model, kernels):
    """The passes of a step with checkpoints, and its layers with products."""
    compiled = compile_plan(model, None, Sink(), world_size=8, settings=["recompute=true"])
    request = Request(batch=Batch(global_batch=8, sequence=1024), layer_kernels=kernels)
    made = answer_for(compiled, request, Sink())
    layers = [x for stage in made.work.stages for x, _ in stage if x.matmuls and not x.loss]
    return Passes(made.work, made.hardware, made.stack), layers


@pytest.mark.parametrize(
    ("model", "kernels", "fewer"),
    [
        ("llama-3.1-8b", "eager", 1),
        ("llama-3.1-8b", "compiled", 1),
        ("llama-3.1-8b", "fused", 0),  # TransformerEngine saves the input behind the product
        ("gemma-2-9b", "eager", 0),  # a norm behind it keeps its output
        ("qwen3-30b-a3b", "eager", 0),  # so do the weights of experts
    ],
)
def test_the_estimate_repeats_as_many(model, kernels, fewer):
    made, layers = passes(model, kernels)
    for layer in layers:
        again = made.recomputation(layer).matmuls
        assert again == layer.matmuls[: len(layer.matmuls) - fewer]
