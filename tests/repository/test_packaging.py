"""A wheel, a plain and an editable install, each in a fresh environment without torch.

Nothing is downloaded: what planc needs there is copied from the environment of the tests.
"""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import console
import numpy
import pytest
from console import call
from folders import ROOT
from helpers import slow

pytest.importorskip("hatchling")

NEEDED = (
    "lark",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
    "attrs",
    "typing_extensions",
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
)
BUILDS = ("hatchling", "pathspec", "pluggy", "packaging", "trove-classifiers", "editables")
"""What builds planc; in a user's environment pip gets it, and removes it again."""


def run(*words, folder, **environment):
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**inherited, **environment},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, capture_output=True)
    [found] = folder.glob("*.whl")
    return found


def copied(names, site):
    """Copies installed packages, as pip installed them."""
    for name in names:
        for file in metadata.files(name) or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = site / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), target)


@pytest.fixture(params=["wheel", slow("plain"), slow("editable")])
def environment(request, wheel, tmp_path):
    """The folder of an environment in which planc is installed, and nothing that has torch."""
    home = tmp_path / "environment"
    venv.create(home)
    [site] = home.glob("lib/python*/site-packages")
    copied(NEEDED, site)
    what = {"wheel": [wheel], "plain": [ROOT], "editable": ["-e", ROOT]}[request.param]
    if request.param != "wheel":
        copied(BUILDS, site)
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "-q"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    done = run(*pip, *options, *what, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    return home


def test_planc_without_torch(environment, tmp_path, monkeypatch):
    def planc(*words):
        cache = str(tmp_path / "cache")
        return run(environment / "bin" / "planc", *words, folder=tmp_path, PLANC_CACHE_DIR=cache)

    python = environment / "bin" / "python"
    assert run(python, "-c", "import planc; print(planc.check)", folder=tmp_path).returncode == 0
    assert run(python, "-c", "import importlib.util as u; assert not u.find_spec('torch')",
               folder=tmp_path).returncode == 0  # fmt: skip
    code = "import planc\ntry: planc.apply(None)\nexcept planc.PlanError as error: print(error)"
    applied = run(python, "-c", code, folder=tmp_path).stdout
    assert applied.startswith("error[PL760]: `planc.apply` needs torch, which is not installed")
    assert planc("--version").stdout.startswith("planc ")
    (tmp_path / "a.plan").write_text('plan a for llama\n\nextend    "llama"\n')
    assert planc("fmt", "--check", "a.plan").returncode == 1
    assert planc("fmt", "a.plan").returncode == 0
    assert planc("fmt", "--check", "a.plan").returncode == 0
    assert planc("explain", "PL501").stdout.startswith("PL501")
    assert "llama-3.1-8b" in planc("list", "models").stdout
    assert "llama" in planc("list", "plans").stdout
    checked = planc("check", "llama-3.1-8b", "a.plan", "--world-size", "8")
    assert checked.returncode == 2 and "[PL760]" in checked.stdout
    assert planc("cache", "unpack", packed(tmp_path, monkeypatch)).returncode == 0
    checked = planc("check", "llama-3.1-8b", "a.plan", "--world-size", "8", "--set", "tp=2")
    assert checked.returncode == 0, checked.stdout
    assert "(proved with torch" in checked.stdout and "machine that packed" in checked.stdout
    for name, more in (("a", ()), ("b", ("--set", "recompute=false"))):
        words = ("lower", "llama-3.1-8b", "a.plan", "--world-size", "8", *more, "--format", "json")
        assert planc(*words, "-o", f"{name}.json").returncode == 0
    assert planc("diff", "llama-3.1-8b", "a.json", "b.json").returncode == 1
    assert planc("diff", "gpt2", "a.json", "a.json").stdout == "No changes.\n"
    assert planc("verify", "llama-3.1-8b", "a.plan").returncode == 2


@pytest.mark.slow
def test_the_readme_outside_of_the_checkout(wheel, tmp_path, monkeypatch):
    """Its commands print the same with the wheel. Other libraries are those of the tests."""
    home, folder = tmp_path / "environment", tmp_path / "folder"
    venv.create(home)
    folder.mkdir()
    [site] = home.glob("lib/python*/site-packages")
    copied(NEEDED, site)
    (site / "libraries.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "-q"]
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--ignore-installed"]
    done = run(*pip, *options, wheel, folder=folder)
    assert done.returncode == 0, done.stderr
    settings = {"PLANC_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "100"}

    def installed(*words, stdin=""):
        assert not stdin
        done = run(home / "bin" / "planc", *words, folder=folder, **settings)
        return done.returncode, done.stdout, done.stderr

    where = run(home / "bin" / "python", "-c", "import planc; print(planc.__file__)", folder=folder)
    assert where.stdout.startswith(str(site))
    monkeypatch.setattr(console, "call", installed)
    page = (ROOT / "README.md").read_text()
    assert console.played(page, folder) == page


def packed(folder, monkeypatch):
    """A pack of this process, which has torch."""
    monkeypatch.setenv("PLANC_CACHE_DIR", str(folder / "own"))
    monkeypatch.chdir(folder)
    for words in (
        ("check", "llama-3.1-8b", "a.plan", "--world-size", "8", "--set", "tp=2"),
        ("cache", "pack", "pack.json"),
    ):
        code, printed, errors = call(*words)
        assert code == 0, printed + errors
    return folder / "pack.json"


def test_the_wheel_has_all_that_ships(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = [
        *(f"grammars/{p.name}" for p in (ROOT / "grammars").glob("*.json")),
        "grammars/plan.lark",
        *(f"plans/{p.relative_to(ROOT / 'plans')}" for p in (ROOT / "plans").rglob("*.plan")),
        *(f"docs/diagnostics/{p.name}" for p in (ROOT / "docs" / "diagnostics").glob("PL*.md")),
    ]
    assert {f"planc/_share/{name}" for name in shipped} <= names
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "planc").rglob("*.py")}
    assert sources <= names and len(sources) > 300


def test_a_plain_install_has_everything(wheel):
    """`pip install planc` brings torch and transformers; leaving them out is a choice."""
    archive = zipfile.ZipFile(wheel)
    [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    lines = archive.read(name).decode().splitlines()
    needed = {line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")}
    plain = {text.split(";")[0].strip() for text in needed if "extra ==" not in text}
    names = {text.partition(">")[0].partition("<")[0] for text in plain}
    assert names >= {"torch", "transformers", "lark", "jsonschema", "rich"}
