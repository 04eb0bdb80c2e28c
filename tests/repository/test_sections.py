"""Rules of `planc/sections/`: a section is a folder that only its table names."""

import ast
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from console import call
from copied_package import copy_package, run_program
from folders import ROOT, TESTS
from quick import CACHE, runs_without_torch, split_page
from test_architecture import PARTS as STAGES

from planc.diagnostics.codes import CODES, Phase
from planc.ops.backend import backend
from planc.ops.registry import SectionOp
from planc.sections import BACKENDS, FOLDER, IMPLIED, NAMES, PARTS, SECTIONS, STATED, Hook
from planc.simulate.certificate import files

PACKAGE = ROOT / "planc"
TOUR = (ROOT / "docs" / "tour.md").read_text()
KNOWN = {
    "quantization": (
        r"\bQuantize\b|[Ff]our_?[Bb]it|FOUR_BIT|4-bit|(?<!Experts )\bin 4 bits|[Qq]lora",
        8,
    ),
    "matmul": (
        r"LowPrecision|ScaleWeights|mxfp8|tensorwise|gathered in fp8|[`\"]matmul[`\"] section"
        r"|fp8 matmul",
        7,
    ),
    "serve": (r"Serving|serving_of|engine_side|[`\"]serve[`\"] section", 4),
    "compile": (r"\bCompile\b|async_tp|[`\"']compile[`\"'] section|(?<!torch, )\"compile\"", 8),
    "loss": (
        r"ChunkLoss|ChunkedLoss|chunk_loss|LOSS_CHUNKS|[`\"]loss[`\"] section|loss sections?\b"
        r"|loss in chunks",
        6,
    ),
    "documents": (r"ResetStates|reset_states|\bRESETS\b|keep_documents_apart", 6),
    "images": (
        r"ShareTower|DivideImages|ImagesSetting|SharedTower|DividedImages|tower_on_all_ranks"
        r"|images_by_rank|standalone\.(towers|divided_images)",
        8,
    ),
    "draws": (r"SyncRng|DrawByRank|DrawApart|sync_rng|draw_by_rank|draw_apart|draws.standalone", 0),
    "train": (r"\bFreeze\b|[`\"']train[`\"'] section|\"train\"|train \{", 10),
}
"""By section: its names and words, and the number of files outside of its folder that have one.
The number only falls, and is at most 8, but for `train`. Stages read which parameters train
(`Plan.freezes`) and which modules are recomputed (`Plan.checkpoint_rules`), so the operations of
`train` and `checkpoint` are the compiler's; estimates read all terms of `checkpoint`, which is not
here."""


def parts_of(name):
    """The modules of a section, by the names of parts, except what scripts inline."""
    paths = sorted((FOLDER / name).glob("*.py"))
    stems = [path.stem for path in paths if path.stem not in ("__init__", "standalone")]
    return {stem: importlib.import_module(f"planc.sections.{name}.{stem}") for stem in stems}


@pytest.fixture(scope="module")
def hooks():
    """The hooks of all stages, by part and name."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    asking = [path for path, text in texts.items() if re.search(r"\bHook\[.+\]\(", text)]
    names = [path.relative_to(ROOT).with_suffix("").parts for path in asking]
    modules = [importlib.import_module(".".join(n).removesuffix(".__init__")) for n in names]
    found = [value for m in modules for value in vars(m).values() if isinstance(value, Hook)]
    assert len(found) == sum(len(re.findall(r"\bHook\[.+\]\(", texts[p])) for p in asking) > 8
    return {(hook.part, hook.name): get_args(hook.__orig_class__)[0] for hook in found}


def test_the_tour_names_each_part_and_hook(hooks):
    """A row a part, in which each hook of a stage is named."""
    rows = dict(re.findall(r"^  \| `(\w+)\.py` \| (.*) \|$", TOUR, re.M))
    assert {*rows} == {*PARTS, "__init__"}
    assert not [hook for part, hook in hooks if f"`{hook}`" not in rows[part]]


def test_the_tour_names_each_folder():
    """In the order of the tree: the packages of planc, the sections and the tools."""
    tree = re.search(r"```\nplanc/\n(.*?)```", TOUR, re.S).group(1)
    named = re.findall(r"^  (\w+)(?:/|\.py) ", tree, re.M)
    parts = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert {*named} | {"__init__", "__main__", "py.typed", "__pycache__"} >= parts >= {*named}
    assert len(parts - {"__pycache__"}) <= 28
    for folder in ("sections", "tools"):
        inner = re.search(rf"^  {folder}/.*\n((?:    .*\n)*)", tree, re.M).group(1)
        assert {*re.findall(r"^    (\w+)/ ", inner, re.M)} == {
            path.parent.name for path in (PACKAGE / folder).glob("*/__init__.py")
        }


def test_each_folder_is_in_the_table():
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert folders == {*NAMES, *BACKENDS.values()} and not {*NAMES} & {*BACKENDS.values()}


def test_a_backend_is_imported_from_its_folder_alone():
    """Its word is a key of the table, whichever packages are installed."""
    assert {word: backend(word).part("ops").BACKEND.WORD for word in BACKENDS} == {
        word: word for word in BACKENDS
    }
    code = "import sys, planc.ops.registry; print([m for m in sys.modules if 'megatron' in m])"
    assert run_program(ROOT, "-c", code, folder=ROOT) == "[]\n"


@pytest.mark.parametrize("name", [*NAMES, *BACKENDS.values()])
def test_only_the_table_names_a_section(name):
    """No stage, and no other section: code that two sections share is in a stage."""
    outside = {path for path in PACKAGE.rglob("*.py") if path.parent != FOLDER / name}
    pattern = re.compile(
        rf"(?<!elaborate\.)\bsections\.{name}\b|from planc\.sections import .*{name}"
    )
    for path in outside - {FOLDER / "__init__.py"}:
        assert not pattern.search(path.read_text()), path


@pytest.mark.parametrize("name", NAMES)
def test_a_declaration_imports_only_its_class(name):
    tree = ast.parse((FOLDER / name / "__init__.py").read_text())
    imports = [ast.unparse(n) for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert imports == ["from planc.sections import SectionDeclaration"]
    rows = SECTIONS[name].codes
    assert {row[0] for row in rows} <= CODES.keys() and set(
        SECTIONS[name].real_sizes
    ) <= CODES.keys()
    assert {row[2] for row in rows} <= {*get_args(Phase)}


@pytest.mark.parametrize("name", NAMES)
def test_public_functions_are_those_that_a_stage_asks(name, hooks):
    for part, module in parts_of(name).items():
        assert part in PARTS, f"{part}: no stage asks it"
        for function, value in vars(module).items():
            own = inspect.isfunction(value) and value.__module__ == module.__name__
            if not own or function.startswith("_"):
                continue
            assert (part, function) in hooks, f"{part}.{function}: no stage asks it"
            assert same_signature(hooks[part, function], value), f"{part}.{function}"


def test_each_part_has_the_floor_of_a_stage():
    assert {*STAGES} == {*PARTS, "__init__"}


def same_signature(wanted, function):
    """Whether a function has the parameters and the result of a `Callable` type."""
    *_, (parameters, result) = [get_args(wanted)]
    hints = get_type_hints(function, include_extras=True)
    own = inspect.signature(function).parameters
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in own.values())
    types = [hints[name] for name in own]
    return plain and types == parameters and fits(result, hints["return"])


def fits(wanted, given):
    """Whether a type is the wanted one, in which `Any` stands for each type."""
    if wanted is Any or wanted == given or (wanted, given) == (None, type(None)):
        return True
    one, two = get_args(wanted), get_args(given)
    same = get_origin(wanted) is get_origin(given) and len(one) == len(two) > 0
    return same and all(map(fits, one, two))


def test_another_signature_is_found(hooks):
    def check(plan, sink): ...

    check.__annotations__ = {"plan": int, "sink": int, "return": None}
    assert not same_signature(hooks["checks", "check"], check)
    assert fits(tuple[Any, ...], tuple[int, ...]) and not fits(tuple[str, ...], tuple[int, ...])


@pytest.mark.parametrize("name", NAMES)
def test_operations_name_their_section(name):
    kinds = getattr(parts_of(name).get("ops"), "KINDS", ())
    for kind in kinds:
        assert issubclass(kind, SectionOp) and name == kind.SECTION


def test_scripts_inline_functions_without_planc():
    """But for private names, which scripts import from their library, and other functions that
    scripts inline. The files are laid out as formatters do by default; that of the package leaves
    these files out.
    """
    paths = sorted(FOLDER.glob("*/standalone.py"))
    needs_planc = re.compile(r"^\s*(from|import) planc(?!\.compat|\.runtime\.standalone)", re.M)
    for path in paths:
        assert not needs_planc.search(path.read_text()), path
    command = ["ruff", "format", "--check", "--isolated", *map(str, paths)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_verdict_depends_on_the_files_of_sections():
    found = {*files()}
    assert {str(path) for path in FOLDER.rglob("*.py")} <= found


PLAIN = """plan plain for any
mesh {
    pp = 1
    dp_shard = auto
    tp = 1
}
tensor on tp {
    **.mlp.{gate,up}_proj : colwise
    **.mlp.down_proj : rowwise
}
fsdp on dp_shard {
    model.layers.* : unit
    root : unit
}
pipeline on pp {
    schedule = 1f1b
    stages = even(model.layers.*)
    microbatches = 4
}
"""
"""A plan without a section of the table."""


def test_a_plan_imports_only_the_parts_of_its_sections(tmp_path):
    """And of these only those that the command needs. All plans use the sections without lines."""
    plain, rounded = tmp_path / "plain.plan", tmp_path / "rounded.plan"
    plain.write_text(PLAIN)
    rounded.write_text(f"{PLAIN}matmul {{\n    **.mlp.*_proj : fp8\n}}\n")
    code = (
        "import json, sys; from console import call; call(*sys.argv[1:]); "
        "print(json.dumps([m for m in sys.modules if m.startswith('planc.sections.')]))"
    )

    def modules(*words):
        words = ("check", "llama-3.2-1b", *words, "--level", "structure")
        return set(json.loads(run_program(ROOT, "-c", code, *words, folder=tmp_path)))

    declared = {f"planc.sections.{name}" for name in NAMES}
    shared = {
        f"planc.sections.{n}.{part}"
        for n in IMPLIED
        for part in ("ops", "infer", "checks", "lowering")
        if (FOLDER / n / f"{part}.py").is_file()
    }
    assert modules(plain) == declared | shared
    parts = {f"planc.sections.matmul.{part}" for part in ("section", "ops", "checks", "lowering")}
    assert modules(rounded) == declared | shared | parts


FORMS = [
    ("--set", "tp=2"),
    ("--set", "pp=2", "--format", "python"),
    ("--format", "json"),
]


@pytest.mark.parametrize("name", NAMES)
def test_without_its_folder_other_plans_are_lowered_to_the_same_bytes(name, tmp_path):
    copy_package(tmp_path, without=[name])
    plain, own = tmp_path / "plain.plan", tmp_path / "own.plan"
    plain.write_text(PLAIN)
    own.write_text(f"{PLAIN}{name} {{\n}}\n")
    base = ("llama-3.1-8b", str(plain), "--world-size", "8")
    commands = [("lower", *base, *words) for words in FORMS]
    wrong = ("check", "llama-3.1-8b", "own.plan", "--level", "structure")
    code = (
        "import json, sys, planc; from console import call; "
        "print(json.dumps([planc.__file__, *(call(*c) for c in json.loads(sys.argv[1]))]))"
    )
    out = run_program(tmp_path, "-c", code, json.dumps([*commands, wrong]), folder=tmp_path)
    path, *results, (exit_code, text, errors) = json.loads(out)
    assert path.startswith(str(tmp_path))
    assert [tuple(result) for result in results] == [call(*words) for words in commands]
    assert all(result[0] == 0 for result in results), results
    assert exit_code == 1 and f"there is no section `{name}`" in text + errors


@pytest.mark.parametrize("name", KNOWN)
def test_few_files_know_a_section(name):
    words, most = KNOWN[name]
    outside = [p for p in PACKAGE.rglob("*.py") if p.parent not in (FOLDER / name, FOLDER)]
    known = sorted(str(p.relative_to(PACKAGE)) for p in outside if re.search(words, p.read_text()))
    assert len(known) == most <= (10 if name == "train" else 8), known


IN_STAGES = {
    "expert": (
        r"DispatchExperts|LimitExperts|ExpertRule|plan\.experts"
        r"|(ops|standalone)\.expert_(parallel|capacity)",
        21,
    ),
    "optimizer": (
        r"\bOptimize\b|OptimizerRule|OptimizerClass|plan\.optimizer|optimizer_rules"
        r"|ops\.optimizer\b|standalone\.(optimizer|kept_states)",
        27,
    ),
    "adapters": (
        r"\bAdapt\b|AdapterRule|\bAdapters\b|plan\.adapters|lowered\.adapters|apply_adapters"
        r"|ops\.lora\b|standalone\.lora",
        54,
    ),
    "context": (
        r"ContextParallel|\bAttend\b|ContextRule|plan\.(context|attention)\b|lowered\.contexts"
        r"|ops\.context\b|standalone\.context",
        38,
    ),
    "pipeline": (
        r"PipelineRule|plan\.pipeline|lowered\.pipeline|ops\.pipeline\b|standalone\.pipeline",
        66,
    ),
    "checkpoint": (
        r"\bCheckpoint\b|checkpoint_rules|checkpoint_ops|ops\.activation_checkpoint"
        r"|standalone\.activation_checkpoint",
        31,
    ),
}
"""The names and words of sections that stages have, all or in part, and the most files with one.
The number only falls, to at most 20."""


@pytest.mark.parametrize("name", IN_STAGES)
def test_no_more_files_know_a_section_of_the_stages(name):
    words, most = IN_STAGES[name]
    files = [p for p in PACKAGE.rglob("*.py") if p.parent not in (FOLDER / name, FOLDER)]
    known = sorted(str(p.relative_to(PACKAGE)) for p in files if re.search(words, p.read_text()))
    assert most - 3 <= len(known) <= most, known


SHIPPED = "\n".join(path.read_text() for path in sorted((ROOT / "plans").rglob("*.plan")))
UNUSED = [name for name in STATED if not re.search(rf"^ *{name}( on .*)? {{", SHIPPED, re.M)]
"""The sections that no shipped plan has."""


@pytest.mark.parametrize("name", UNUSED)
def test_examples_of_make_quick_that_need_a_section_are_in_its_folder(name):
    head = re.compile(rf"^ *{name}( on .*)? {{", re.M)
    for page in sorted((TESTS / "specs").glob("*.md")):
        introduction, *sections = split_page(page)
        for section in sections:
            quick = runs_without_torch(section)
            title = section.partition("\n")[0]
            assert not (quick and head.search(introduction + section)), f"{page.name}: {title}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*UNUSED, *IMPLIED])
def test_without_its_folder_make_quick_passes(name, tmp_path):
    """In a copy of the checkout without the folder, its line and its tests, with its own schema.

    Only the ceilings of words fall with the words of the folder. The copy begins with the cache of
    the checkout, if it has one.
    """
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for path in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / path).is_file() and not path.startswith(("planc/", f"tests/sections/{name}/")):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, tmp_path / path)
    copy_package(tmp_path, without=[name])
    if CACHE.is_dir():
        shutil.copytree(CACHE, tmp_path / CACHE.relative_to(ROOT))
    schema = run_program(tmp_path, "-m", "planc.ops.schema", folder=tmp_path)
    (tmp_path / "grammars" / "lowered.schema.json").write_text(schema)
    run_program(tmp_path, "-W", "ignore", "tests/quick.py", folder=tmp_path)
    words = ("-m", "pytest", "--quick", "-k", "not test_ceilings_fall")
    text = run_program(tmp_path, *words, folder=tmp_path)
    assert re.search(r"\d{3,} passed", text), text
