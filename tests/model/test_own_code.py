"""A verdict is of the functions that run: those that a script has put into a model's place, or
that are its own, have verdicts of their own.
"""

import functools
import importlib
import inspect
import json
import types
from pathlib import Path

import pytest
import torch
from helpers import sampled
from modelfolder import CONFIG
from torch import nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import planc
from planc.answers.target import compile_for, module_facts
from planc.model.own_code import own_code
from planc.proof import small_case
from planc.proof.in_subprocess import prove_in_subprocess
from planc.proxy.user_model import without_devices
from planc.simulate import verdict_store

PLAN = 'plan t for llama\nextend "llama"\n'
SETTINGS = {"world_size": 2, "overrides": ["tp=2", "sequence=false"]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.plan").write_text(PLAN)
    return tmp_path


def llama(**fields):
    values = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    return LlamaForCausalLM(LlamaConfig(**{**values, **fields}))


def known(model, plan="t.plan"):
    lowered = planc.lower(model, plan, **SETTINGS)
    return verdict_store.recall(lowered, module_facts(model)).level


def proved(model, plan="t.plan"):
    """As `apply(prove=True)` proves it."""
    size, settings = SETTINGS["world_size"], SETTINGS["overrides"]
    compiled, sink = compile_for(model, plan, size, settings, False)
    assert not sink.errors and compiled.lowered is not None
    return prove_in_subprocess(compiled, allow_code=False)


# What a script puts into the place of a library's code --------------------------------------------


def right(self, x):
    """The MLP as a kernel computes it."""
    gate = self.gate_proj(x)
    return self.down_proj(gate * torch.sigmoid(gate) * self.up_proj(x))


def over_features(self, x):
    """Normalizes over the features that tp splits."""
    inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(inner / inner.square().mean(-1, keepdim=True).sqrt())


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def of_class(patch, model):
    patch.setattr(modeling_llama.LlamaMLP, "forward", right)


def of_wrapper(patch, model):
    plain = modeling_llama.LlamaMLP.forward
    patch.setattr(modeling_llama.LlamaMLP, "forward", decorated(plain))


def of_another_class(patch, model):
    other = modeling_llama.LlamaMLP.forward
    patch.setattr(modeling_llama.LlamaRMSNorm, "forward", other)


def of_instance(patch, model):
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(right, mlp)


def of_partial(patch, model):
    mlp = model.model.layers[1].mlp
    mlp.forward = functools.partial(right, mlp)


def of_pre_hook(patch, model):
    model.model.layers[0].register_forward_pre_hook(lambda module, args: None)


def of_hook(patch, model):
    model.model.norm.register_forward_hook(lambda module, args, output: None)


def of_module(patch, model):
    plain = modeling_llama.apply_rotary_pos_emb
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", decorated(plain))


def of_torch(patch, model):
    plain = nn.functional.cross_entropy
    patch.setattr(nn.functional, "cross_entropy", decorated(plain))


def of_layer(patch, model):
    plain = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", decorated(plain))


def of_loss(patch, model):
    model.loss_function = lambda logits, labels, **_: logits.mean()


def attention(module, query, key, value, mask, scaling, **more):
    plain = modeling_llama.eager_attention_forward
    return plain(module, query, key, value, mask, scaling=scaling)


def across_heads(module, query, key, value, mask, scaling, **more):
    """Mixes heads, which tp splits."""
    out, weights = attention(module, query, key, value, mask, scaling)
    return out - out.mean(2, keepdim=True), weights


def of_attention(patch, model, function=attention):
    patch.setitem(AttentionInterface._global_mapping, "mine", function)
    model.config._attn_implementation = "mine"


def of_attribute(patch, model):
    model.model.rotary_emb.rope_init_fn = lambda *args, **more: None


def of_a_callable(patch, model):
    class Hook:
        def __call__(self, module, args):
            return args

    model.model.layers[0].register_forward_pre_hook(Hook())


def of_every_module(patch, model):
    hooks = nn.modules.module._global_forward_hooks
    patch.setitem(hooks, -1, lambda module, args, output: None)


PATCHES = [
    *(of_attribute, of_a_callable, of_every_module),
    *(of_class, of_wrapper, of_another_class, of_instance, of_partial, of_pre_hook, of_hook),
    *(of_module, of_torch, of_layer, of_loss, of_attention),
]


@pytest.mark.parametrize("change", PATCHES)
def test_what_a_script_changes_is_seen(change, monkeypatch):
    model = llama()
    assert not own_code(model)
    with monkeypatch.context() as patch:
        change(patch, model)
        first = own_code(model)
        assert first and first == own_code(model)
        assert first.attention == ("mine" if change is of_attention else "")
    if change in (of_class, of_wrapper, of_another_class, of_module, of_torch, of_layer):
        assert not own_code(model)


def test_hooks_of_transformers_are_no_code_of_a_script():
    model = llama()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    assert model.get_input_embeddings()._forward_hooks and not own_code(model)


def test_two_functions_in_one_place_are_two(monkeypatch):
    found = set()
    for function in (right, over_features, lambda self, x: x, lambda self, x: -x):
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", function)
        found.add(own_code(llama()).code)
    assert len(found) == 4


def test_what_a_function_calls_belongs_to_it(monkeypatch):
    def forward(self, x):
        return scaled(x)  # noqa: F821, a global of the test

    monkeypatch.setitem(globals(), "scaled", lambda x: 2 * x)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    first = own_code(llama())
    monkeypatch.setitem(globals(), "scaled", lambda x: 3 * x)
    assert own_code(llama()).code != first.code


def test_a_plain_model_of_any_size_has_no_code_of_its_own(monkeypatch):
    assert not own_code(llama(num_hidden_layers=1))
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", right)
    assert own_code(llama(num_hidden_layers=1)).code == own_code(llama(hidden_size=32)).code


FAMILIES = sorted(
    p.parent.name for p in Path(modeling_llama.__file__).parents[1].glob("*/modeling_*")
)


@pytest.mark.parametrize("family", sampled(dict.fromkeys(FAMILIES), 12))
def test_the_classes_of_transformers_run_no_code_of_a_script(family):
    from planc.model.own_code import _Walk

    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError:
        return  # of a package that is not installed, or a file of another name
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, nn.Module):
            walk = _Walk(implementations=frozenset({"eager", "sdpa", "grouped_mm"}))
            walk.of_class(cls)
            walk.follow()
            assert not walk.found, cls


# The verdicts ------------------------------------------------------------------------------------


def test_a_plan_is_proved_for_the_functions_that_run(folder, monkeypatch):
    planc.check(llama(), "t.plan", **SETTINGS)
    assert known(llama()) == "proved"
    for function, level in ((over_features, "refuted"), (right, "proved")):
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama.LlamaMLP, "forward", function)
            assert known(llama()) == "unproved"
            found = proved(llama())
            assert found.level == level, found
            assert known(llama()) == level
    assert known(llama()) == "proved"


@pytest.mark.parametrize(("function", "level"), [(attention, "proved"), (across_heads, "refuted")])
def test_an_attention_function_of_the_script_is_proved(folder, monkeypatch, function, level):
    model = llama()
    of_attention(monkeypatch, model, function)
    found = proved(model)
    assert found.level == level and known(model) == level, found


def test_an_instance_is_proved_on_copies_of_the_model(folder, monkeypatch):
    model = llama()
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(over_features, layer.mlp)
    found = proved(model)
    assert found.level == "refuted" and known(model) == "refuted", found


def closed_over(mlp):
    return lambda x: over_features(mlp, x)


def by_default(mlp):
    def forward(x, own=mlp):
        return over_features(own, x)

    return forward


def around(mlp):
    mlp.act_fn.register_forward_hook(lambda module, args, output: output / mlp.up_proj.weight.std())
    return decorated(mlp.forward)


@pytest.mark.parametrize("made", [closed_over, by_default, around])
def test_functions_that_hold_modules_hold_those_of_the_copies(folder, made):
    model = llama()
    for layer in model.model.layers:
        layer.mlp.forward = made(layer.mlp)
    found = proved(model)
    assert found.level == "refuted", found


def test_a_copy_without_devices_is_the_same_model():
    model = llama(tie_word_embeddings=True)
    mlp = model.model.layers[0].mlp
    mlp.forward = closed_over(mlp)
    copy = without_devices(model)
    assert {p.device.type for p in copy.parameters()} == {"meta"}
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert all(torch.equal(b, model.get_buffer(n)) for n, b in copy.named_buffers())
    assert own_code(copy) == own_code(model)
    assert copy.model.layers[0].mlp.forward.__closure__[0].cell_contents is copy.model.layers[0].mlp


def test_a_check_of_a_name_keeps_nothing_of_a_changed_class(folder, monkeypatch):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaMLP, "forward", over_features)
        assert any(d.severity == "error" for d in planc.check(str(folder), "t.plan", **SETTINGS))
    assert not any(d.severity == "error" for d in planc.check(str(folder), "t.plan", **SETTINGS))


# Modules of the user's own ------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) / (1 + self.eps)


class Net(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block(eps) for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


OWN = """plan own for Net

mesh {
    tp = 2
}

tensor on tp {
    blocks.* {
        up   : colwise
        down : rowwise
    }
}
"""


LOCAL = """plan local for Net

mesh {
    dp = 2
}

replicate on dp {
    root : unit
}
"""


@pytest.fixture
def own(folder, monkeypatch):
    (folder / "own.plan").write_text(OWN)
    (folder / "bad.plan").write_text(OWN.replace(": rowwise", ": rowwise(-> partial)"))
    monkeypatch.setitem(SETTINGS, "overrides", [])
    return folder


def test_a_verdict_on_a_module_of_ones_own_is_kept(own):
    assert known(Net(), "own.plan") == known(Net(), "bad.plan") == "unproved"
    planc.check(Net(), "own.plan", **SETTINGS)
    planc.check(Net(), "bad.plan", **SETTINGS)
    assert known(Net(), "own.plan") == "proved" and known(Net(), "bad.plan") == "refuted"
    with torch.device("meta"):
        assert known(Net(), "own.plan") == "proved"
    assert known(Net(1e-3), "own.plan") == "unproved"
    changed = Net()
    changed.blocks[0].forward = types.MethodType(Block.forward, changed.blocks[1])
    assert known(changed, "own.plan") == "unproved"


def test_a_model_that_cannot_be_imported_elsewhere_is_proved(own):
    """By a copy of this process: its class is in no file that another could import."""

    class Net(nn.Sequential):
        def forward(self, ids):
            return self[1](self[0](ids))

    (own / "local.plan").write_text(LOCAL)
    found = proved(Net(nn.Embedding(64, 16), nn.Linear(16, 64)), "local.plan")
    assert found.level == "proved", found


def test_the_verdict_of_the_command_is_found_by_a_script(own, monkeypatch):
    monkeypatch.syspath_prepend(str(own))
    source = f"import torch\nfrom torch import nn\n\n{inspect.getsource(Block)}\n\n"
    (own / "mine.py").write_text(f"{source}{inspect.getsource(Net)}")
    planc.check("mine:Net", "own.plan", allow_code=True, **SETTINGS)
    assert known(Net(), "own.plan") == "proved"


def test_a_large_model_with_functions_of_instances_is_not_decided(folder, monkeypatch):
    monkeypatch.setattr(small_case, "UNSHRUNK", 1000)
    model = llama()
    model.model.layers[0].mlp.forward = types.MethodType(right, model.model.layers[0].mlp)
    found = proved(model)
    assert found.level == "undecided" and "put yours into the classes" in found.text
