"""The lowered plan as JSON: exact there and back, and no traceback on what is no such thing."""

import dataclasses
import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowered import llama, modules, moved, plans, rule, with_fields, with_ops

from planc.diagnostics.diagnostic import Sink, one_of
from planc.files.resources import GRAMMARS
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.backend import Backend
from planc.ops.base import kind_of
from planc.ops.document import digest, dumps, loads
from planc.ops.registry import kinds
from planc.ops.schema import schema as generated
from planc.ops.styles import Colwise, Input, Redistribution, Replicate, Shard


def read(text):
    """What `loads` gives, and the messages; each is PL007."""
    sink = Sink()
    lowered = loads(text, "x.json", sink)
    assert all(d.code == "PL007" for d in sink)
    assert (lowered is None) == sink.has_errors
    return lowered, [d.message for d in sink]


def broken(change):
    """The messages about a document that `change` has changed."""
    data = json.loads(dumps(llama()))
    change(data)
    lowered, messages = read(json.dumps(data))
    assert lowered is None
    return messages


def test_llama_there_and_back(golden):
    text = dumps(llama())
    golden("llama.lowered.json", text)
    lowered, messages = read(text)
    assert messages == []
    assert lowered == llama()
    assert dumps(lowered) == text  # places too, which equality does not see
    assert digest(lowered) == digest(llama())


def test_the_schema_is_one_and_takes_what_is_written():
    schema = json.loads((GRAMMARS / "lowered.schema.json").read_text())
    assert schema == generated()  # `make pages` writes it anew
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(dumps(llama())), schema)


def test_modules_read_back_know_no_structure():
    lowered, _ = read(dumps(llama()))
    assert {op.modules.module.kind for op in lowered.ops if hasattr(op, "modules")} == {"other"}


@given(plans())
def test_any_plan_there_and_back(plan):
    text = dumps(plan)
    lowered, messages = read(text)
    assert messages == []
    assert lowered == plan
    assert dumps(lowered) == text
    assert digest(lowered) == digest(plan)


def test_digest_ignores_places_and_reasons():
    plan = moved(llama())
    assert dumps(plan) != dumps(llama())
    assert digest(plan) == digest(llama())
    because = tuple(
        dataclasses.replace(op, reason="because") if hasattr(op, "reason") else op
        for op in plan.ops
    )
    assert digest(with_ops(plan, *because)) == digest(llama())


@pytest.mark.parametrize("name", ["place", "reason"])
def test_digest_sees_an_argument_with_the_name_of_what_it_ignores(name):
    def plan(change):
        return with_ops(llama(), rule("lm_head", Input(named=((name, change),))))

    one, two = Redistribution(Shard(1), Replicate()), Redistribution(Shard(0), Replicate())
    assert digest(plan(one)) != digest(plan(two))


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 31},
        {"data": ()},
        {"parameters": 1},
        {"axes": llama(ranks=128).axes},
        {"ops": llama().ops[1:]},
        {"ops": (*llama().ops[:-1], dataclasses.replace(llama().ops[-1], reshard=True))},
        {"ops": (*llama().ops[:-1], dataclasses.replace(llama().ops[-1], param=None))},
        {"ops": llama().ops[::-1]},
    ],
)
def test_digest_sees_what_decides(change):
    assert digest(with_fields(llama(), **change)) != digest(llama())


# What is no lowered plan -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON: expecting value"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: it nests too deep"),
        ('{"a": ' * 100_000, "is not JSON: it nests too deep"),
        ("1" * 5000, "is not JSON"),
        ("\ufeff{}", "is not JSON"),
        ("\x00", "is not JSON"),
        ("[]", "has no format_version"),
        ("null", "has no format_version"),
        ("{}", "has no format_version"),
        ('{"format_version": 1}', "has format_version 1; this planc reads 2"),
        ('{"format_version": true}', "has format_version true"),
        ('{"format_version": 2.0}', "has format_version 2.0"),
        ('{"format_version": "2"}', 'has format_version "2"'),
        ('{"a": 1, "a": 2}', 'an object has the key "a" twice'),
    ],
)
def test_what_is_no_lowered_plan(text, said):
    _, (message,) = read(text)
    assert message.startswith("x.json ")
    assert said in message


def test_all_that_is_wrong_is_said_with_its_place():
    def change(data):
        data["extra"] = 1
        data["mesh"][0]["size"] = 8.0
        data["mesh"][1]["size"] = 0
        data["stages"][0]["ops"][1]["style"]["output"] = "sharded"
        data["stages"][0]["ops"][1]["shapes"][0]["shape"] = "big"
        data["stages"][0]["ops"][2]["style"]["name"] = "diagonal"
        data["stages"][0]["ops"][3]["modules"] = "model layers"
        data["stages"][0]["ops"][4]["color"] = "red"
        del data["stages"][0]["ops"][5]["axes"]
        data["stages"][0]["ops"][-1]["reshard"] = None
        data["stages"][0]["ops"].append({"op": "explode"})
        data["stages"][0]["ops"].append(3)

    kinds_and_backends = [
        k for kind in kinds() for k in (kind.all_installed() if kind is Backend else [kind])
    ]
    names = [json.dumps(kind_of(kind)) for kind in kinds_and_backends]
    assert broken(change) == [
        'x.json, at the top: "extra" is not known here; known are format_version, plan, model, '
        "family, layers, mesh, experts, data, stages and module_dicts",
        "x.json, at mesh[0].size: 8.0 is not of type integer",
        "x.json, at mesh[1].size: 0 is less than 1",
        'x.json, at stages[0].ops[1].shapes[0].shape: "big" is not of type array',
        'x.json, at stages[0].ops[1].style.output: "sharded" is not a layout',
        'x.json, at stages[0].ops[2].style.name: "diagonal" is not "colwise", "rowwise", '
        '"sequence", "input", "output", "replicate", "mla_kv", "parameters", "experts", '
        '"features", "attributes" or "python"',
        'x.json, at stages[0].ops[3].modules: "model layers" is not a set of modules',
        'x.json, at stages[0].ops[4]: "color" is not known here; known are op, modules, axes, '
        "style, shapes, inferred, place and origins",
        "x.json, at stages[0].ops[5]: axes is missing",
        "x.json, at stages[0].ops[20].reshard: null is not of type boolean or integer",
        f'x.json, at stages[0].ops[21].op: "explode" is not {one_of(names)}',
        "x.json, at stages[0].ops[22]: 3 is not of type object",
    ]


def test_what_no_schema_can_say():
    def change(data):
        data["mesh"][1]["name"] = "tp"
        data["data"] = ["dp"]
        data["stages"][0]["ops"][1]["axes"] = ["ep"]
        data["stages"][0]["ops"][2]["modules"] = "model.layers[0:16,16:32].mlp"
        data["stages"][0]["ops"][3]["modules"] = "model.layers[5:3].mlp"
        data["stages"][0]["ops"][4]["shapes"][0]["local"] = [1]
        data["stages"][0]["ops"][16]["shard"] = ["pp", "pp"]
        data["stages"][0]["ops"][17]["replicate"] = ["nodes"]
        data["stages"][0]["ops"][18]["group"] = True
        data["stages"][0]["ops"][18]["members"] = ["lm_head", "model.norm[3:3]"]
        data["stages"][0]["ops"][19]["group"] = False
        data["stages"][0]["ops"][19]["shard"] = ["pp"]
        data["stages"][0]["ops"][20]["shard"] = ["tp"]

    mesh = "it has pp, tp and tp"
    assert sorted(broken(change)) == sorted(
        [
            'x.json, at mesh[2].name: the mesh has two axes of the name "tp"',
            'x.json, at stages[0].ops[2].modules: "model.layers[0:16,16:32].mlp" is written '
            '"model.layers[0:32].mlp"',
            'x.json, at stages[0].ops[3].modules: "model.layers[5:3].mlp" is not a set of modules',
            "x.json, at stages[0].ops[4].shapes[0]: shape and local have different numbers of dims",
            "x.json, at stages[0].ops[16]: an axis is named twice: pp, pp",
            'x.json, at stages[0].ops[18].members[1]: "model.norm[3:3]" is not a set of modules',
            "x.json, at stages[0].ops[19].members: only a group has several members",
            f'x.json, at data[0]: the mesh has no axis "dp"; {mesh}',
            f'x.json, at stages[0].ops[1].axes[0]: the mesh has no axis "ep"; {mesh}',
            f'x.json, at stages[0].ops[17].shard[0]: the mesh has no axis "dp_shard"; {mesh}',
            f'x.json, at stages[0].ops[17].replicate[0]: the mesh has no axis "nodes"; {mesh}',
            f'x.json, at stages[0].ops[18].shard[0]: the mesh has no axis "dp_shard"; {mesh}',
        ]
    )


def test_very_many_findings_are_counted():
    def change(data):
        data["stages"][0]["ops"] = [{"op": "tie"}] * 1000

    messages = broken(change)
    assert len(messages) == 51
    assert messages[0] == "x.json, at stages[0].ops[0]: parameter, source and place are missing"
    assert messages[-1] == "x.json, at further places: 950 more findings"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.text())
def test_any_text(text):
    lowered, messages = read(text)
    assert lowered is None
    assert messages


@given(st.data())
def test_any_document_with_junk_somewhere(data):
    """One value of a right document is replaced, or a key added: a plan or findings, no more."""
    top = {"document": json.loads(dumps(llama(layers=2)))}
    node, key = top, "document"
    while isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
        node = node[key]
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
    if isinstance(node, dict) and data.draw(st.booleans()):
        key = data.draw(st.text())
    node[key] = data.draw(junk)
    text = json.dumps(top["document"])
    lowered, _ = read(text)
    if lowered is not None:
        assert json.loads(dumps(lowered)) == json.loads(text)


def test_a_plan_of_one_rank_and_no_operations():
    plan = with_ops(llama(ranks=1, tp=1))
    assert read(dumps(plan))[0] == plan


def test_a_list_stays_on_its_line():
    plan = with_ops(
        llama(), rule("lm_head", Colwise(), 8, 4, split=0), Checkpoint(modules=modules("a"))
    )
    text = dumps(plan)
    assert '      "shapes": [{"name": "weight", "shape": [8, 4], "local": [1, 4]}],\n' in text
    assert text.endswith("}\n")
