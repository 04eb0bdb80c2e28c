"""Backends of other distributions: an entry point, and nothing of planc knows its name.

`toy` stands for one: it wraps nothing, and its data are what a section of a plan says.
"""

import json
import os
import subprocess
import sys

import pytest
from folders import ROOT

PLAN = """plan t for llama
mesh {
    dp_shard = auto
}
fsdp on dp_shard {
    backend = toy
    color = red
    model.layers.* : unit
    root : unit
}
"""
OPERATION = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from planc.ops import call
from planc.ops.backend import Backend
from planc.ops.base import Name

Path(__file__).with_name("was_loaded").touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy(Backend):
    color: Name
    WORD: ClassVar = "toy"
    TITLE: ClassVar = "Toy"
    FUNCTION: ClassVar = "toy.runtime.wrap"
    NEEDS: ClassVar = "toy"
    UNPROVED: ClassVar = "toys prove nothing"
    SETTINGS: ClassVar = ("color",)

    def units(self):
        yield from ()

    def calls(self, context):
        yield call.Once(call=call.FunctionCall("toy.runtime:wrap", (call.MODEL, self.color)))

    def headline(self, mesh=None):
        return f"in {self.color}"
"""
PARTS = {
    "section": """
from toy import Toy
def read(lines, section, scope):
    color = lines["color"].value.path
    return Toy(members=(), shard=(), color=color, origin=lines["backend"].origin)
""",
    "checks": """
def check(plan, section, own, facts, sink):
    if own.color == "blue":
        sink.error("PL498", "no toy is blue", own.origin, help="write `color = red`")
""",
    "lowering": """
from dataclasses import replace
def lower_shards(plan, op, facts, holdings):
    members = [m for u in plan.fsdp.units if not u.root for m in u.members]
    return replace(op, members=tuple(members), shard=plan.fsdp.shard, nbytes=7)
""",
    "runtime": "def wrap(model, color): ...\n",
}


@pytest.fixture
def toys(tmp_path):
    """A folder with the distribution `toys`."""
    folder = tmp_path / "toys"
    (folder / "toy").mkdir(parents=True)
    (folder / "toy" / "__init__.py").write_text(OPERATION)
    for name, text in PARTS.items():
        (folder / "toy" / f"{name}.py").write_text(text)
    about = folder / "toys-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[planc.backends]\ntoy = toy:Toy\n")
    (tmp_path / "toy.plan").write_text(PLAN)
    return folder


def planc(*words, at, installed=()):
    """A command in a folder, with further folders where Python finds what is installed."""
    path = os.pathsep.join(map(str, [ROOT, *installed]))
    done = subprocess.run(
        [sys.executable, "-m", "planc", *words, "--world-size", "8"],
        cwd=at,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_backend_of_another_distribution(toys, tmp_path):
    words = ("llama-3.1-8b", "toy.plan")
    code, said = planc("lower", *words, at=tmp_path, installed=[toys])
    assert code == 0 and "toy         in red" in said and "7 B of parameters" in said
    code, said = planc("lower", *words, "--format", "json", at=tmp_path, installed=[toys])
    [op] = [op for op in json.loads(said)["stages"][0]["ops"] if op["op"] == "toy"]
    assert (op["color"], op["members"]) == ("red", ["model.layers[0:32]"])
    (tmp_path / "toy.json").write_text(said)
    code, said = planc("diff", *words, "toy.json", at=tmp_path, installed=[toys])
    assert (code, said) == (0, "No changes.\n")
    code, said = planc("lower", *words, "--format", "python", at=tmp_path, installed=[toys])
    assert code == 0 and 'toy.runtime.wrap(model, "red")' in said
    assert "it needs toy and torch" in said
    code, said = planc("check", *words, at=tmp_path, installed=[toys])
    assert code == 0 and "toys prove" in said
    (tmp_path / "toy.plan").write_text(PLAN.replace("red", "blue"))
    code, said = planc("check", *words, at=tmp_path, installed=[toys])
    assert code == 1 and "no toy is blue" in said


def test_none_is_loaded_where_no_plan_names_it(toys, tmp_path):
    (tmp_path / "toy.plan").write_text(
        PLAN.replace("    backend = toy\n    color = red\n", "    backend = torch\n")
    )
    words = ("check", "llama-3.1-8b", "toy.plan", "--level", "structure")
    assert planc(*words, at=tmp_path, installed=[toys])[0] == 0
    assert not (toys / "toy" / "was_loaded").exists()


def test_the_folder_of_a_plan_installs_nothing(toys):
    """`python -m planc` has its folder among those where Python finds modules."""
    (toys / "toy.plan").write_text(PLAN)
    code, said = planc("check", "llama-3.1-8b", "toy.plan", at=toys)
    assert code == 1 and "not `toy`" in said
    assert not (toys / "toy" / "was_loaded").exists()
