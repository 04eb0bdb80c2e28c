"""Tokens sent by DeepEP: the library is replaced by one with its documented interface."""

import copy
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import simulated
from test_expert_parallel import EXPERTS, HIDDEN, experts, forward_and_back, inputs
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

import planc
from planc.diagnostic import PlanError
from planc.emit.python.script import render
from planc.ops.document import digest
from planc.runtime.standalone import expert_deepep
from planc.runtime.standalone.expert_deepep import dispatch_by_deepep
from planc.trial.thread_ranks import run_ranks

PLAN = """plan sent for any

extend "mixtral"

override expert on ep {
    $experts : dispatch(deepep)
}
"""


class ElasticBuffer:
    """`dispatch` and `combine` as the library documents them, by sums over all ranks."""

    num_bytes = 1

    def __init__(self, group, *, num_max_tokens_per_rank, hidden, num_topk):
        assert num_max_tokens_per_rank > 0 and hidden == HIDDEN and num_topk > 0
        self.group = group

    @staticmethod
    def get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, *, num_topk):
        return 1

    def every(self, own, most):
        made = own.new_zeros((self.group.size(), most, *own.shape[1:]))
        made[self.group.rank(), : len(own)] = own
        distributed.all_reduce(made, group=self.group)
        return made

    def dispatch(self, x, *, handle=None, topk_idx=None, topk_weights=None, **sizes):
        assert x.dtype == torch.bfloat16 and len(x)
        if handle is not None:
            return self.every(x, handle.most)[handle.places], None, None, handle, None
        assert topk_weights.dtype == torch.float32 and topk_idx.dtype == torch.int64
        most, local = sizes["num_max_tokens_per_rank"], sizes["num_experts"] // self.group.size()
        index = self.every(topk_idx + 1, most) - 1 - local * self.group.rank()
        index[(index < 0) | (index >= local)] = -1
        places = (index >= 0).any(-1).nonzero(as_tuple=True)
        handle = SimpleNamespace(places=places, most=most, own=len(x))
        weights = self.every(topk_weights, most)[places]
        return self.every(x, most)[places], index[places], weights, handle, None

    def combine(self, x, *, handle, topk_weights=None):
        assert x.dtype == torch.bfloat16

        def summed(rows):
            made = rows.new_zeros((self.group.size(), handle.most, *rows.shape[1:]))
            made[handle.places] = rows
            distributed.all_reduce(made, group=self.group)
            return made[self.group.rank(), : handle.own]

        return summed(x), None if topk_weights is None else summed(topk_weights), None


@pytest.fixture
def deep_ep(monkeypatch):
    made = ModuleType("deep_ep")
    made.ElasticBuffer = ElasticBuffer
    monkeypatch.setitem(sys.modules, "deep_ep", made)
    monkeypatch.setattr(expert_deepep, "BUFFERS", {})


@pytest.mark.parametrize("route", ["each its own", "all to one", "no expert"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_outputs_and_gradients_are_those_of_whole_experts(deep_ep, family, route):
    if family == "gpt_oss" and route == "no expert":
        pytest.skip("gpt_oss has no number for no expert")
    torch.manual_seed(0)
    whole, given = experts(family).bfloat16(), inputs(family, route)
    given = [v.bfloat16() if v.is_floating_point() else v for v in given]
    upstream = torch.randn_like(given[0])
    right = [forward_and_back(whole, given, rank, upstream) for rank in range(2)]
    parts = [copy.deepcopy(whole) for _ in range(2)]
    seen = {}

    def rank(number):
        module = parts[number]
        module.zero_grad()
        dispatch_by_deepep(module, init_device_mesh("cpu", (2,)))
        seen[number] = forward_and_back(module, given, number, upstream)

    assert run_ranks(2, rank, 60) is None
    for number, found in seen.items():
        for mine, wanted in zip(found, right[number], strict=True):
            assert (mine - wanted).abs().max() <= 0.03 * wanted.abs().max().clamp_min(1e-3)
    first = [slice(r * EXPERTS // 2, (r + 1) * EXPERTS // 2) for r in range(2)]
    for part, own in zip(parts, first, strict=True):
        for mine, full in zip(part.parameters(), whole.parameters(), strict=True):
            error = (mine.grad.to_local() - full.grad[own]).abs().max()
            assert error <= 0.03 * full.grad.abs().max()


def test_hidden_states_are_bfloat16(deep_ep):
    module, given = experts("mixtral"), inputs("mixtral", "each its own")

    def rank(_number):
        made = copy.deepcopy(module)
        dispatch_by_deepep(made, init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="DeepEP sends bfloat16"):
            made(*(v[0] for v in given))

    assert run_ranks(2, rank, 60) is None


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "sent.plan"
    made.write_text(PLAN)
    return str(made)


def test_it_is_lowered_proved_and_said(path):
    lowered = planc.lower("mixtral-8x7b", path, world_size=8, overrides=["ep=4", "tp=2"])
    script = render(lowered, digest=digest(lowered))
    assert "dispatch_by_deepep(" in script and "from deep_ep import ElasticBuffer" in script
    verdict, _ = simulated("mixtral-8x7b", path, ["ep=4"], world=8)
    assert verdict.verdict == "proved"
    assert "deepep" in [s.name for s in verdict.sections if s.verdict == "left out"]


def test_without_the_library_nothing_is_applied(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    sizes = dict(hidden_size=32, intermediate_size=32, num_local_experts=4, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
    lowered = planc.lower("mixtral-8x7b", path, world_size=2, overrides=["ep=2"])
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(PlanError) as caught:
        planc.apply(model, path, overrides=["ep=2"], device_type="cpu", world_size=2)
    assert [d.code for d in caught.value.diagnostics] == ["PL532"]
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert lowered.experts is not None
