"""A section that only tests have: a folder and a line of the table suffice for every command."""

import json
from pathlib import Path

import pytest
from console import call
from copied_package import copy_package, run_program

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What `clamp_program.py` prints in a copy of planc with the section."""
    target, folder = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("plans")
    copy_package(target, added=[HERE / "clamp"])
    found = json.loads(run_program(target, HERE / "clamp_program.py", folder=folder))
    assert Path(found["file"]).is_relative_to(target)
    return found


def test_without_the_folder_there_is_no_section(tmp_path):
    plan = tmp_path / "clamped.plan"
    plan.write_text('plan clamped for any\n\nextend "llama"\n\nclamp {\n}\n')
    code, text, _ = call("check", "llama-3.2-1b", plan, "--level", "structure")
    assert code == 1 and "PL011" in text and "there is no section `clamp`" in text


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("check", 0, ["layout flow (proved"]),
        ("list", 1, ["PL999", "lists.plan:6"]),
        ("typo", 1, ["PL012", "most"]),
        ("setting", 1, ["PL011", "it holds rules: `model.layers.*.mlp : outputs(most = 100)`"]),
        ("lower", 0, ["clamp", "model.layers[0:16].mlp", "outputs of at most 0.01"]),
        ("json", 0, ['"op": "clamp"', '"most": 0.01']),
        ("read", 0, ["outputs of at most 0.01"]),
        ("python", 0, ["def clamp(module, most):", "def clamp_outputs(model"]),
        ("why", 0, ["clamp", "outputs of at most 0.01", "clamped.plan:6"]),
        ("estimate", 0, ["memory of a rank"]),
        ("diff", 1, ["clamp model.layers[0:16].mlp  most 0.01 -> 0.02"]),
        ("fmt", 0, []),
    ],
)
def test_commands(results, command, code, words):
    found, text = results[command]
    assert found == code, text
    assert [word for word in words if word not in text] == []


def test_json_and_scripts_are_complete(results):
    assert json.loads(results["why json"][1])["clamp"][0]["op"]["most"] == 0.01
    assert results["read"][1].splitlines()[2:] == results["lower"][1].splitlines()[2:]
    compile(results["python"][1], "script", "exec")


def test_two_ranks_compute_what_one_process_computes(results):
    assert results["ranks"]["effect"] > 1e-3 > 1e3 * results["ranks"]["wrong"]


def test_an_editor_knows_its_words(results):
    assert results["editor"]["words"] == {"outputs": "`outputs(most = 100)`"}
    assert "clamp" in results["editor"]["top"]
