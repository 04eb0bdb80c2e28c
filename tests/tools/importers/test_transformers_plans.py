"""`planc import` of a DistributedConfig: all four plans of all types with a plan, and sizes.

The table docs/generated/transformers-plans.md has a row for each folder with a tensor or expert
plan: `pytest --update` writes it.
"""

import json

import pytest
from console import call
from folders import ROOT

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.tools.importers.importer import import_plan

PAGE = ROOT / "docs" / "generated" / "transformers-plans.md"
KINDS = ("tp", "ep", "pp", "fsdp")


def shipped_plans():
    """The plans of each model type that ships one for tensors or experts, by their kind."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name in sorted(CONFIG_MAPPING.keys()):
        cls = CONFIG_MAPPING[name]
        plans = {kind: getattr(cls, f"base_model_{kind}_plan", None) or {} for kind in KINDS}
        if plans["tp"] or plans["ep"]:
            yield name, plans


def distributed_config(name, plans):
    """A DistributedConfig with all plans of a folder, written out, and a size for each."""
    sizes = {"fsdp_size": 2, "dp_replicate_size": 2}
    sizes |= {"tp_size": 2} if plans["tp"] else {}
    sizes |= {"ep_size": 2, "ep_implementation": "auto"} if plans["ep"] else {}
    more = {"fsdp_mixed_precision": True, "fsdp_cpu_offload": True}
    written = {f"{kind}_plan": plan for kind, plan in plans.items() if plan}
    return {"model_type": name, **sizes, **more, **written}


def imported(values, folder):
    path = folder / "a.json"
    path.write_text(json.dumps(values))
    sink = Sink()
    return import_plan(str(path), sink, peer=None, model=None), sink


def cell(result, kind):
    """The rules of one plan: the number, and how many of them are lines of the plan."""
    fates = {leaf.path: fate for leaf, fate, _ in result.fate if leaf.path.startswith(f"{kind}_")}
    rules = {path: fate for path, fate in fates.items() if "_plan." in path}
    lines = sum(fate == "plan" for fate in rules.values())
    return f"{lines} of {len(rules)}" if rules else ""


HEAD = """# The plans of transformers' folders

A row for each model type of transformers 5.23 with a plan for tensor or expert parallelism. A cell
counts the rules that `planc import` writes as lines of a plan, and all rules. The other rules
follow from these lines, or are in the plan of the family: no rule is lost. Made by
`pytest tests/tools/importers/test_transformers_plans.py --update`.
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The result of the import of each folder's plans."""
    folder = tmp_path_factory.mktemp("plans")
    return {
        name: imported(distributed_config(name, plans), folder) for name, plans in shipped_plans()
    }


@pytest.mark.slow
def test_nothing_of_a_shipped_plan_is_left_to_decide(folders):
    left = {
        name: [(leaf.path, why) for leaf, kind, why in result.fate if kind in ("lost", "unknown")]
        for name, (result, _) in folders.items()
    }
    assert not {name: keys for name, keys in left.items() if keys}
    assert not {
        name: [d.message for d in sink] for name, (_, sink) in folders.items() if list(sink)
    }
    assert len(folders) > 140


@pytest.mark.slow
def test_the_table_of_all_folders(folders, request):
    rows = ["| type | tp | ep | pp | fsdp |", "|---|---|---|---|---|"]
    for name, (result, _) in folders.items():
        cells = [cell(result, kind) for kind in KINDS]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    text = "\n".join([HEAD, *rows, ""])
    if request.config.getoption("--update"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text


@pytest.mark.parametrize("name", ["aria_text", "granite_swa"])
def test_the_imported_plan_compiles(name, tmp_path):
    """A plan with packed rows of experts, and one with sinks of attention, on the default sizes."""
    from transformers import AutoConfig

    values = AutoConfig.for_model(name).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    result, findings = imported(distributed_config(name, dict(shipped_plans())[name]), tmp_path)
    assert not list(findings)
    (tmp_path / "a.plan").write_text(result.text)
    sink, model = Sink(), str(tmp_path / "config.json")
    compiled = compile_plan(model, str(tmp_path / "a.plan"), sink, world_size=8, settings=())
    assert compiled.lowered and not sink.has_errors, [d.message for d in sink]


@pytest.mark.parametrize(("size", "written"), [(1, True), (2, False)])
def test_divided_experts_are_not_split_as_well(size, written, tmp_path):
    """`_resolve_parallel_plans`: "EP rules take precedence"."""
    plans = dict(shipped_plans())["mixtral"]
    values = distributed_config("mixtral", plans) | {"ep_size": size}
    result, sink = imported(values, tmp_path)
    assert ("mlp.experts" in result.text.partition("\n#   ")[0]) is written and not list(sink)


def rules_of(values, tmp_path, kind="tensor on tp"):
    result, _ = imported(values, tmp_path)
    lines = result.text.partition(kind)[2].partition("\n}")[0].splitlines()[1:]
    return {
        line.partition(" :")[0].strip(): line.partition(": ")[2] for line in lines if ":" in line
    }


def test_rules_of_a_config_are_added_to_those_of_the_model(tmp_path):
    """As `_resolve_parallel_plans` merges them: `plan | override`."""
    values = {"model_type": "llama", "tp_size": 2}
    changed = {"tp_plan": {"model.layers.*.self_attn.o_proj": "rowwise_split_input"}}
    own = rules_of({**values, "tp_plan": {"layers.*.self_attn.o_proj": "rowwise"}}, tmp_path)
    other = rules_of({**values, **changed}, tmp_path)
    assert own["$blocks.mlp.up_proj"] == "colwise" and own.keys() == other.keys()
    assert {*own.values()} == {"colwise", "rowwise"}


def test_a_style_of_experts_keeps_its_dims(tmp_path):
    plan = {
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "packed_rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
    }
    values = {"model_type": "aria_text", "tp_size": 2, "base_model_tp_plan": plan}
    result, _ = imported(values, tmp_path)
    text = " ".join(result.text.split())
    assert "experts(gate_up_proj = shard(2, parts = 2), down_proj = shard(1))" in text


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"ep_implementation": "all_reduce"}, "$experts : dispatch(all_reduce)"),
        ({"fsdp_plan": {"layers.*": "keep_full_weight"}}, "$blocks : unit(reshard = never)"),
        ({"fsdp_plan": {"layers.*.mlp": "free_full_weight"}}, ".mlp : unit(reshard = always)"),
        ({"fsdp_cpu_offload": True}, "offload(cpu)"),
        ({"dp_replicate_size": 2}, "override dp_replicate = 2"),
    ],
)  # fmt: skip
def test_settings_of_a_distributed_config(values, line, tmp_path):
    sizes = {"model_type": "mixtral", "tp_size": 2, "fsdp_size": 2, "ep_size": 2}
    result, sink = imported({**sizes, **values}, tmp_path)
    assert line in " ".join(result.text.split()) and not list(sink)


def test_a_config_in_a_script_is_read_and_not_run(tmp_path):
    (tmp_path / "train.py").write_text(
        "raise SystemExit\n"
        'rules = {"model.layers.*.self_attn.o_proj": "rowwise"}\n'
        "config = DistributedConfig(tp_size=2, tp_plan=rules, fsdp_size=4, ep_size=2)\n"
        "model = AutoModelForCausalLM.from_pretrained(NAME, distributed_config=config)\n"
    )
    code, text, errors = call("import", tmp_path / "train.py", "--model", "mixtral-8x7b")
    assert code == 0, errors
    for axis in ("dp_shard = 4", "tp       = 2", "ep       = 2"):
        assert f"override {axis}" in text
    assert "$blocks.self_attn.q_proj" in text  # a rule of the model's own plan


@pytest.mark.parametrize(
    ("size", "more", "codes"),
    [
        (1, {"tp_plan": {}}, []),
        (2, {"tp_plan": {}}, ["PL763"]),
        (2, {"enable_expert_parallel": True}, ["PL763"]),
        (2, {"enable_expert_parallel": True, "ep_size": 2}, []),
    ],
)
def test_an_empty_plan_is_reported(size, more, codes, tmp_path):
    """transformers documents it, and raises: "`tp_size=2` was requested, but ... no `tp_plan`"."""
    values = {"model_type": "mixtral", "tp_size": size, "fsdp_size": 2, **more}
    result, sink = imported(values, tmp_path)
    assert not more.get("enable_expert_parallel") or "override ep = 2" in " ".join(
        result.text.split()
    )
    assert [d.code for d in sink] == codes
    assert ("override tensor on tp" in result.text) is bool(codes)
