"""The list of torch's operators, and saving by op where torch's own is silently wrong."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    create_selective_checkpoint_contexts,
)

from planc.ops.activation_checkpoint import GROUPS, _table, has_operator_list, is_dispatched, like
from planc.runtime.standalone import activation_checkpoint
from planc.runtime.standalone.activation_checkpoint import (
    offloading,
    operators,
    saving,
    saving_on_cpu,
)


def resolved(name):
    return next(operators([name]), None)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list is of torch 2.13")
def test_the_list_is_torchs():
    composite = "CompositeImplicitAutograd"
    assert len(_table()) > 1500
    for name, visible in _table().items():
        op = resolved(name)
        assert isinstance(op, torch._ops.OpOverload) and not op._schema.is_mutable, name
        full = op._schema.name + (f".{op._schema.overload_name}" * bool(op._schema.overload_name))
        taken_apart = torch._C._dispatch_has_kernel_for_dispatch_key(full, composite)
        assert visible is not taken_apart, name


def test_the_groups_are_of_the_list():
    for names in GROUPS.values():
        assert all(is_dispatched(name) for name in names if has_operator_list(name))
        assert any(resolved(name) is not None for name in names)


def test_checkpoint_conversion():
    assert (
        is_dispatched("aten.mm.default") is True and is_dispatched("aten.linear.default") is False
    )
    assert is_dispatched("aten.mmm.default") is None and not has_operator_list("mylib.op.default")
    assert like("aten.mm") == ["aten.mm.default", "aten.mm.dtype"]
    assert resolved("aten.nothing.default") is None


GROUP = (1, ("aten.mm.default", "aten.bmm.default"))


class Shifted(nn.Module):
    """As a gemma3n block does it: what is added in place is what comes after."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = self.one(x)
        y += x
        return self.two(torch.tanh(y))


def gradients(context, fn=None):
    torch.manual_seed(0)
    module = Shifted()
    x = torch.randn(2, 3, 8)
    if context or fn:
        options = {"context_fn": context} if context else {"checkpoint_fn": fn}
        module = checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
    module(x).square().sum().backward()
    return [p.grad for p in module.parameters()]


def same(one, two):
    return all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(one, two, strict=True))


def test_a_result_that_is_changed_in_place_is_kept_as_it_was():
    right = gradients(None)
    ops = list(operators(GROUP[1]))
    # should this become equal, torch sees to it itself, and `_Keep` can go
    assert not same(right, gradients(lambda: create_selective_checkpoint_contexts(ops)))
    assert same(right, gradients(saving(GROUP)))
    assert same(right, gradients(None, offloading(False, context_fn=saving_on_cpu(False, GROUP))))


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = self.one(x)
        return y, self.two(torch.tanh(y))


def test_a_result_that_is_changed_after_its_module_is_an_error():
    module = checkpoint_wrapper(Product(), context_fn=saving(GROUP))
    one, two = module(torch.randn(2, 3, 8))
    with torch.no_grad():
        one += 1
    with pytest.raises(RuntimeError, match="changed in place after it was saved"):
        two.sum().backward()


def test_every_counts_the_calls_of_one_forward_pass():
    contexts = saving((2, ("aten.mm.default",)))
    for _ in range(2):  # it starts anew each time
        keep, _reuse = contexts()
        with keep:
            for _ in range(5):
                torch.ones(2, 2) @ torch.ones(2, 2)
        held = keep.storage[torch.ops.aten.mm.default]
        assert [type(held[i]).__name__ for i in range(5)] == ["_Held", "object"] * 2 + ["_Held"]


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        first = torch.native_dropout(self.one(x), 0.5, True)[0]
        return nn.functional.dropout(self.two(torch.tanh(first)), 0.5)


@pytest.mark.parametrize("kept", [saving, partial(saving_on_cpu, False)])
def test_what_draws_is_computed_again(kept, monkeypatch):
    """Else what draws after it would draw its numbers in the recomputation."""

    def found(context):
        module, x = Drops(), torch.ones(4, 8)
        run = module if context is None else checkpoint_wrapper(module, context_fn=context)
        torch.manual_seed(1)
        run(x).square().sum().backward()
        return [p.grad for p in module.parameters()]

    group = 1, ("aten.native_dropout.default",)
    right = found(None)
    assert all(map(torch.equal, right, found(kept(group))))
    monkeypatch.setattr(activation_checkpoint, "draws", lambda *_: False)
    assert not all(map(torch.equal, right, found(kept(group))))
