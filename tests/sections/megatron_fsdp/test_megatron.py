"""`backend = megatron`: what it means, what it lowers to and emits. tests/specs/megatron.md has
what it cannot honor, test_megatron_fsdp.py how the real package trains.
"""

import inspect
import json
import sys
import types

import pytest
import torch
from helpers import fsdp, judged, lowered
from test_fsdp import HEAD
from torch import distributed, nn

import planc
from planc.compiler import Compiled
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.diffing.compare import compare
from planc.diffing.render import render as diff_of
from planc.emit.python.script import render as script
from planc.emit.text import render as text_of
from planc.ops.document import digest, dumps, loads
from planc.provenance.query import why
from planc.sections.megatron_fsdp.ops import OPTIONS, MegatronShard

BLOCKS = "model.layers.* : unit"
MESH = "plan t for llama\nmesh {\n dp_replicate = 2\n dp_shard = auto\n dp_in = 2\n}\n"
WIDE = "dp_shard * dp_in, replicate on dp_replicate"


def megatron(*lines, on="dp_shard", root=True):
    return fsdp("backend = megatron", *lines, on=on, root=root)


def op_of(text, **others):
    [op] = [o for o in lowered(text, **others).ops if isinstance(o, MegatronShard)]
    return op


# Meaning -----------------------------------------------------------------------------------------


def test_the_plain_section():
    op = op_of(HEAD + megatron(BLOCKS))
    assert [str(m) for m in op.members] == ["model.layers[0:32]"]
    assert op.classes == ("LlamaDecoderLayer",)
    assert (op.shard, op.replicate, op.strategy) == (("dp_shard",), (), "optim_grads_params")
    assert (op.main_params, op.main_grads, op.grad_comm) == ("float32", None, None)
    assert not op.summed and not op.experts and op.options == () and op.place == "t.plan:6"


def test_everything_that_can_be_said():
    op = op_of(
        MESH
        + megatron(
            "outer_strategy = optim",
            "divide = 1",
            "precision(param = bf16, reduce = bf16)",
            "megatron(main_grads = fp32, main_params = none, nccl_ub = true)",
            "model.layers.* : unit(reshard = always)",
            on=WIDE,
        )
    )
    assert (op.shard, op.replicate) == (("dp_shard", "dp_in"), ("dp_replicate",))
    assert (op.strategy, op.outer, op.summed) == ("optim_grads_params", "optim", True)
    assert (op.main_params, op.main_grads, op.grad_comm) == (None, "float32", "bfloat16")
    assert op.options == (("nccl_ub", True),)


def test_reduce_alone_is_what_gradients_add_up_in():
    op = op_of(HEAD + megatron("precision(reduce = fp32)", BLOCKS))
    assert (op.main_grads, op.grad_comm) == ("float32", None)


def test_the_words_of_torch_stay_torch():
    assert lowered(HEAD + fsdp("backend = torch", BLOCKS)) == lowered(HEAD + fsdp(BLOCKS))


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_bytes_follow_the_strategy(strategy):
    op = op_of(HEAD + megatron(f"strategy = {strategy}", BLOCKS))
    model, main = 8_030_261_248 * 2, 8_030_261_248 * 4  # bf16, and fp32 for the optimizer
    rest = (2 * 128_256 * 4096 + 4096) * 2  # in no unit: it stays gathered
    weights = model // 8 + rest if strategy == "optim_grads_params" else model
    assert op.nbytes == weights + (main if strategy == "no_shard" else main // 8)


def test_experts_are_known_by_their_names():
    plan = HEAD.replace("llama", "mixtral") + megatron(BLOCKS)
    assert op_of(plan, model="mixtral-8x7b").experts


# What becomes of it ------------------------------------------------------------------------------

FULL = MESH + megatron(
    "precision(param = bf16, reduce = fp32)", "megatron(disable_bucketing = true)", BLOCKS, on=WIDE
)


def test_goldens(golden):
    plan = lowered(FULL)
    golden("megatron.txt", text_of(plan, digest=digest(plan)))
    golden("megatron.py", script(plan, digest=digest(plan)))
    golden("megatron.json", dumps(plan))


def test_the_document_comes_back():
    plan = lowered(FULL)
    found = Sink()
    again = loads(dumps(plan), "it", found)
    assert not found.has_errors and dumps(again) == dumps(plan)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("strategy", "zero3", "ops[1].strategy"),
        ("shard", ["there"], "no axis"),
        ("shard", [], "ops[1].shard"),
        ("classes", [], "ops[1].classes"),
        ("members", ["model..layers"], "not a set of modules"),
        ("options", {"nccl": True}, "not known"),
        ("options", {"nccl_ub": False}, "nccl_ub"),
        ("main_grads", "int3", "main_grads"),
    ],
)
def test_a_document_that_is_wrong(field, value, said):
    data = json.loads(dumps(lowered(FULL)))
    data["stages"][0]["ops"][1][field] = value
    found = Sink()
    assert loads(json.dumps(data), "it", found) is None
    assert any(said in d.message for d in found), [d.message for d in found]


def test_the_schema_knows_every_option():
    from planc.files.resources import GRAMMARS

    schema = json.loads((GRAMMARS / "lowered.schema.json").read_text())
    known = schema["$defs"]["megatron_shard"]["properties"]["options"]["properties"]
    assert {name: rule["const"] for name, rule in known.items()} == {
        name: not default for name, default in OPTIONS.items()
    }


def test_a_diff_with_torch_and_with_itself():
    torchs, mine = lowered(HEAD + fsdp(BLOCKS)), lowered(HEAD + megatron(BLOCKS))
    text = diff_of(compare(torchs, mine))
    assert "+ megatron" in text and "- fsdp model.layers[0:32]" in text
    other = lowered(HEAD + megatron("strategy = optim", BLOCKS))
    text = diff_of(compare(mine, other))
    assert "~ megatron" in text and "strategy optim_grads_params -> optim" in text
    assert compare(mine, lowered(HEAD + "\n" + megatron(BLOCKS))).same


def test_why_names_the_unit_and_the_call():
    plan, known, _ = judged(HEAD + megatron(BLOCKS))
    low = lowered(HEAD + megatron(BLOCKS))
    done = Compiled(facts=known, plan=plan, applied=(plan, known), lowered=low)
    inside = why("model.layers.3.mlp.up_proj.weight", done, Sink())
    assert "Megatron-FSDP, on dp_shard = 8" in inside.unit[0].what
    assert inside.unit[0].target == "model.layers.3" and inside.parameters[0].shard == (1792, 4096)
    rest = why("lm_head", done, Sink())
    assert rest.unit[0].target == "root" and rest.parameters[0].shard == (16032, 4096)


# The call ----------------------------------------------------------------------------------------


class Recorder(types.ModuleType):
    """In the place of megatron_fsdp: it writes down what it is called with, and does nothing."""

    def __init__(self):
        super().__init__("megatron_fsdp")
        self.__spec__ = types.SimpleNamespace(name="megatron_fsdp")
        self.calls = []

    def MixedPrecisionPolicy(self, **given):
        return tuple(sorted(given.items(), key=str))

    def fully_shard_model(self, **given):
        self.calls.append(given)
        return nn.Module()


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setitem(sys.modules, "megatron_fsdp", made)
    monkeypatch.setattr("planc.sections.megatron_fsdp.runtime.DEVICES", ("cpu",))
    monkeypatch.setattr("planc.sections.megatron_fsdp.runtime.find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


@pytest.fixture
def world():
    """Eight ranks of which this is one; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(size):
        distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())

    yield start
    if distributed.is_initialized():
        distributed.destroy_process_group()


def small():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_hidden_layers=2, **sizes))


TURNED = "plan t for llama\nmesh {\n dp_shard = auto\n dp_in = 2\n dp_replicate = 2\n}\n"
PLANS = {
    "plain": HEAD + megatron(BLOCKS),
    "hybrid": MESH + megatron(BLOCKS, on=WIDE),
    "turned": TURNED + megatron(BLOCKS, on=WIDE),
    "everything": MESH
    + megatron(
        "outer_strategy = optim",
        "divide = 1",
        "precision(reduce = bf16)",
        "megatron(main_grads = fp32, average_in_collective = true)",
        BLOCKS,
        on=WIDE,
    ),
}


def told(call):
    """A recorded call, as far as two of them can be compared."""
    mesh = call["device_mesh"]
    groups = {n: distributed.get_process_group_ranks(g) for n, g in call.items() if "group" in n}
    plain = {
        n: v for n, v in call.items() if n not in groups and n not in ("module", "device_mesh")
    }
    return mesh.mesh.tolist(), mesh.mesh_dim_names, groups, plain


@pytest.mark.parametrize("name", PLANS)
def test_the_script_makes_the_call_of_apply(name, recorder, world, tmp_path):
    path = tmp_path / "t.plan"
    path.write_text(PLANS[name])
    world(8)
    first, second = small(), small()
    run = planc.apply(first, str(path), device_type="cpu")
    assert recorder.calls[0]["module"] is first
    space = {}
    exec(script(run.lowered, digest=run.digest), space)
    second_mesh = space["build_mesh"]("cpu")
    assert space["parallelize"](second, second_mesh) is second
    one, two = recorder.calls
    assert told(one) == told(two)
    assert one["fsdp_unit_modules"] == [type(first.model.layers[0])]
    assert two["module"] is second


def test_where_ranks_are(recorder, world, tmp_path):
    """The package's mesh is (replicate, shard, one): the plan's ranks, in its order."""
    path = tmp_path / "t.plan"
    path.write_text(PLANS["turned"])
    world(8)
    planc.apply(small(), str(path), device_type="cpu")
    mesh, names, groups, call = told(recorder.calls[0])
    assert names == ("dp_replicate", "dp_shard_dp_in", "tp_of_one")
    assert mesh == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    assert sorted(groups["hybrid_fsdp_group"]) == list(range(8))
    assert (call["dp_outer_dim"], call["dp_shard_dim"]) == names[:2]


@pytest.mark.parametrize("name", PLANS)
def test_the_real_package_takes_these_keywords(name, recorder, world, tmp_path, monkeypatch):
    path = tmp_path / "t.plan"
    path.write_text(PLANS[name])
    world(8)
    planc.apply(small(), str(path), device_type="cpu")
    monkeypatch.delitem(sys.modules, "megatron_fsdp")
    real = pytest.importorskip("megatron_fsdp")
    inspect.signature(real.fully_shard_model).bind(**recorder.calls[0])
    policy = dict(recorder.calls[0]["mixed_precision_policy"])
    assert real.MixedPrecisionPolicy(**policy).main_params_dtype == policy["main_params_dtype"]


def test_the_real_package_has_these_options_and_defaults():
    real = pytest.importorskip("megatron_fsdp")
    known = inspect.signature(real.fully_shard_model).parameters
    assert {name: known[name].default for name in OPTIONS} == OPTIONS
    assert real.MixedPrecisionPolicy().main_params_dtype == torch.float32


# What it needs -----------------------------------------------------------------------------------


def untouched(tmp_path):
    """The error of an apply, which left the model as it was."""
    path = tmp_path / "t.plan"
    path.write_text(HEAD + megatron(BLOCKS))
    model = small()
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(PlanError) as caught:
        planc.apply(model, str(path), device_type="cpu")
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert model.config.use_cache is True and not distributed.is_initialized()
    [found] = caught.value.diagnostics
    return found


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr("planc.sections.megatron_fsdp.runtime.find_spec", lambda _: None)
    found = untouched(tmp_path)
    assert found.code == "PL499" and "megatron-fsdp cannot be imported" in found.message
    assert found.help == "pip install 'planc[megatron]'"


def test_without_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr("planc.sections.megatron_fsdp.runtime.find_spec", lambda _: True)
    found = untouched(tmp_path)
    assert found.code == "PL499" and "runs only on CUDA, and this run is on cpu" in found.message


def test_a_subclass_of_a_unit_is_no_surprise(recorder, world, tmp_path):
    """The package goes by `isinstance`, the plan by modules: what differs is said before."""
    path = tmp_path / "t.plan"
    path.write_text(HEAD + megatron(BLOCKS))
    world(8)
    model = small()
    lowered_plan = planc.lower(model, str(path), world_size=8)

    class Other(type(model.model.layers[0])):
        pass

    model.model.norm = Other(model.config, 0)
    with pytest.raises(PlanError) as caught:
        planc.apply(model, lowered_plan, device_type="cpu")
    assert caught.value.diagnostics[0].code == "PL494"
    assert "model.norm is a Other" in str(caught.value) and not recorder.calls
