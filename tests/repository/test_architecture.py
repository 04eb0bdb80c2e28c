"""The house rules that a machine can hold: floors, imports, sizes."""

import ast
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter

import pytest
from folders import ROOT, TESTS

PACKAGE = ROOT / "planc"
FLOORS = {
    "files": 0,
    "sections": 0,
    "diagnostics": 1,
    "compat": 2,
    "model": 3,
    "syntax": 3,
    "ops": 4,
    "proxy": 4,
    "diffing": 5,
    "ir": 5,
    "elaborate": 6,
    "infer": 6,
    "checks": 7,
    "tools.importers": 7,
    "lowering": 8,
    "emit": 9,
    "tools.transfer": 9,
    "runtime": 10,
    "simulate": 11,
    "tools.estimate": 13,
    "compiler": 14,
    "proof": 15,
    "provenance": 15,
    "tools.audit": 16,
    "tools.editor": 15,
    "tools.measure": 15,
    "tools.init": 16,
    "tools.launch": 16,
    "tools.order": 16,
    "tools.show": 16,
    "tools.suggest": 16,
    "answers": 17,
    "commands": 18,
    "cli": 19,
    "__init__": 20,
    "__main__": 21,
    "integrations": 21,
}
PARTS = {
    "__init__": "sections",
    "ops": "ops",
    "section": "elaborate",
    "infer": "infer",
    "checks": "checks",
    "lowering": "lowering",
    "standalone": "runtime",
    "runtime": "runtime",
    "estimate": "tools.estimate",
    "choice": "compiler",
    "provenance": "provenance",
    "proof": "proof",
}
"""The stage of each part of a section: a part may import what its stage may import."""
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path):
    """The parsed source of a file, which several tests walk."""
    return ast.parse(path.read_text())


def home(path):
    """The package or module to which a file belongs, by its name in `FLOORS`."""
    return floor_name(path.relative_to(PACKAGE).with_suffix("").parts)


def floor_name(parts):
    """The name in `FLOORS` of a module, given by its names below planc: a tool has its own, and a
    part of a section that of its stage.
    """
    if parts[0] == "sections" and len(parts) > 2:
        return PARTS[parts[2] or "__init__"]
    return ".".join(parts[:2]) if parts[0] == "tools" and len(parts) > 2 else parts[0]


def imports(path):
    """(line, name of the floor imported, whether only for type checking)."""
    tree = tree_of(path)
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names = [node.module]
            if node.module == "planc":
                names = [f"planc.{a.name}" for a in node.names]
        for name in names:
            if name.startswith("planc."):
                yield node.lineno, floor_name((*name.split(".")[1:], "")), id(node) in typing


def test_floors():
    assert not [line for path in FILES for line in upward_imports(path)]


def upward_imports(path):
    """A line for each import of a file from its own floor or one above."""
    own = home(path)
    for line, other, typing in imports(path):
        if other not in (own, "source") and not typing and FLOORS[other] >= FLOORS[own]:
            yield (
                f"{path.relative_to(PACKAGE)}:{line}: {own} (floor {FLOORS[own]}) imports "
                f"{other} (floor {FLOORS[other]})"
            )


def test_no_circles():
    """No module imports one that imports it, by any way; imports for types and inside functions
    count.
    """
    paths = {".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts): f for f in FILES}
    files = {name.removesuffix(".__init__"): file for name, file in paths.items()}
    uses = {name: {*_imported(file, files)} for name, file in files.items()}
    assert sum(map(len, uses.values())) > 1000
    TopologicalSorter(uses).prepare()  # raises CycleError, which names the circle


def _imported(path, known):
    """The modules of the package that a file imports, of a package only what it names there."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inside = (f"{node.module}.{a.name}" for a in node.names)
            yield from (name if name in known else node.module for name in inside)


def test_sizes():
    assert not [line for path in FILES for line in excess_lines(path)]


def excess_lines(path):
    """A line for a file that is too long, and for each function in it that is."""
    name = path.relative_to(PACKAGE)
    lines = path.read_text().count("\n")
    if lines > 600:
        yield f"{name} has {lines} lines: split the file"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            body = node.body
            documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            start = body[1].lineno if documented and len(body) > 1 else body[0].lineno
            length = (node.end_lineno or 0) - start + 1
            if length > 40:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines"


def test_the_compiler_is_one_page():
    assert (PACKAGE / "compiler.py").read_text().count("\n") <= 132


def test_names_do_not_shadow_the_standard_library():
    assert not FLOORS.keys() & sys.stdlib_module_names


def test_a_class_name_means_one_thing():
    """But for what an operation stands for, and an expression of the syntax."""
    found = [
        node.name
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    twice = {name for name in found if found.count(name) > 1}
    assert twice <= {"ContextParallel", "Choice"}


def test_compiling_imports_no_torch():
    """Everything but the model on a cold cache and the runtime works without torch."""
    modules = (
        "syntax elaborate infer.infer_layouts checks ops.document emit.text emit.python.script "
        "diffing.compare diffing.render diagnostics tools.estimate.answer cli"
    )
    imported = "; ".join(f"import planc.{m}" for m in modules.split())
    code = (
        f"import sys; {imported}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_calls_are_data():
    """Operations name them, the printer writes them, and the executor alone looks names up."""
    for path in FILES:
        text = path.read_text()
        for call in ("parallelize_module(", "fully_shard(", "checkpoint_wrapper("):
            assert f" {call}" not in text, f"{path} calls {call}"
        if home(path) == "runtime" and "import_module" in text:
            assert path.name == "calls.py", f"{path} looks up names"


def test_stages_and_inlined_definitions_have_names_of_their_own():
    from planc.emit.python.inlined_source import definitions
    from planc.ops.fsdp import FullyShard
    from planc.ops.registry import kinds

    copies = FullyShard(members=(), shard=(), replicate=("r",), reshard=False)
    stages = [*(kind.SCRIPT for kind in kinds()), copies.script]
    assert len(stages) > 25
    assert not {stage.name for stage in stages} & definitions().keys()


KIND_DECISIONS = 32
"""The most decisions by kind of operation outside of `ops`. It only falls: an operation answers for
itself, by a class variable or a method of `Op`."""
KIND_FILES = ("ops/*.py", "sections/*/ops.py")


def _names(*nodes):
    inside = [inner for node in nodes for inner in ast.walk(node)]
    attributes = {n.attr for n in inside if isinstance(n, ast.Attribute)}
    return attributes | {n.id for n in inside if isinstance(n, ast.Name)}


def _kinds():
    """The names of the classes of operations."""
    kinds = {"Op"}
    for path in [p for pattern in KIND_FILES for p in sorted(PACKAGE.glob(pattern))]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and _names(*node.bases) & kinds:
                kinds.add(node.name)
    return kinds - {"Op"}


def _decides(node, kinds):
    """Whether an expression asks which kind an operation is."""
    if isinstance(node, ast.MatchClass):
        return bool(_names(node.cls) & kinds)
    if not isinstance(node, ast.Call):
        return False
    function = getattr(node.func, "id", getattr(node.func, "attr", ""))
    asks = function in ("isinstance", "find_ops", "has", "first", "only")
    return asks and any(_names(argument) & kinds for argument in node.args)


def test_operations_speak_for_themselves():
    kinds = _kinds()
    assert len(kinds) > 25
    outside = ("ops", "sections")
    files = [f for f in FILES if f.relative_to(PACKAGE).parts[0] not in outside]
    nodes = (node for f in files for node in ast.walk(ast.parse(f.read_text())))
    count = sum(_decides(node, kinds) for node in nodes)
    assert count <= KIND_DECISIONS, "let the operation answer: a class variable or a method of `Op`"
    assert count == KIND_DECISIONS, f"fewer than before: lower `KIND_DECISIONS` to {count}"


def test_the_list_of_kinds_is_in_the_order_of_phases():
    """A diff prints changes in the order of the list, and `lower` in that of phases."""
    from planc.ops.registry import kinds

    phases = [kind.PHASE for kind in kinds()]
    assert phases == sorted(phases) and len(set(phases)) > 10


def test_fields_of_operations_hide_nothing_that_all_operations_answer():
    """A dataclass field replaces a property of the base class without an error."""
    from planc.ops.backend import Backend
    from planc.ops.base import Op
    from planc.ops.registry import kinds

    answers = {name for name in vars(Op) if not name.startswith("_")} - {"origin", "origins"}
    for kind in (*kinds(), *Backend.all_installed()):
        own = {f.name for f in fields(kind)} - {"origin", "origins"}
        assert not own & answers, f"{kind.__name__}: {own & answers}"


def test_what_scripts_inline_has_one_name_each():
    """A script has the definitions of all files in one: the last of two of a name would count."""
    found = {}
    inlined = [*PACKAGE.glob("runtime/standalone/*.py"), *PACKAGE.glob("sections/*/standalone.py")]
    for path in sorted(inlined):
        for node in tree_of(path).body:
            targets = getattr(node, "targets", [getattr(node, "target", node)])
            for name in (getattr(t, "name", getattr(t, "id", None)) for t in targets):
                if name is not None:
                    found.setdefault(name, set()).add(path)
    assert len(found) > 100
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_one_module_knows_axes_by_their_names():
    """What an axis is for is its role: a plan may call its axes as it likes."""
    names = {"dp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "pp", "dp_cp", "ep_shard"}
    table = PACKAGE / "ir" / "mesh_axes.py"
    found = {
        path: sorted(
            names
            & {
                n.value
                for n in ast.walk(tree_of(path))
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
        )
        for path in FILES
    }
    assert found.pop(table)
    assert not any(found.values()), {str(p): n for p, n in found.items() if n}


def test_few_files_know_a_backend():
    """The table, `compat`, and the importer of Megatron-LM's configurations."""
    own = PACKAGE / "sections" / "megatron_fsdp"
    files = [f for f in (*FILES, *PACKAGE.rglob("*.toml")) if f.parent != own]
    found = [str(f.relative_to(PACKAGE)) for f in files if "megatron" in f.read_text().lower()]
    assert 0 < len(found) <= 4, sorted(found)


def test_only_compat_model_and_proxy_import_transformers():
    """And what is registered with its attention interface, which emitted scripts inline, and what
    is for its users.
    """
    registered = PACKAGE / "runtime" / "standalone" / "context.py"
    for path in {p for p in FILES if home(p) != "integrations"} - {registered}:
        for node in ast.walk(tree_of(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(n.split(".")[0] == "transformers" for n in names):
                assert home(path) in ("compat", "model", "proxy"), path


LIBRARIES = {
    *("accelerate", "bitsandbytes", "diffusers", "lightning", "megatron_fsdp", "peft", "torch"),
    *("torchao", "transformers", "trl"),
}
_NO_PROMISE = {"transformers.conversion_mapping", "transformers.core_model_loading"}
"""Modules of private names that no underscore marks."""


def private_imports(path):
    """(line, name) of each import of a private name or module of a library."""
    for node in ast.walk(tree_of(path)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            first, *parts = name.split(".")
            private = any(re.match("_[^_]", part) for part in parts)
            unmarked = name.rpartition(".")[0] in _NO_PROMISE
            if first in LIBRARIES and (private or unmarked):
                yield node.lineno, name


def test_private_names_of_libraries_are_imported_in_one_folder():
    """Others import them from `planc.compat`, which refuses a version that lacks one."""
    homes = {home(path) for path in FILES if any(private_imports(path))}
    assert homes == {"compat"}, [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in FILES
        if home(path) != "compat"
        for line, name in private_imports(path)
    ]


def test_every_test_is_collected(request):
    """pytest leaves out folders by name, such as `build` and `dist`; no test is in one of those."""
    left_out = request.config.getini("norecursedirs")
    for file in TESTS.rglob("test_*.py"):
        for folder in file.relative_to(TESTS).parts[:-1]:
            assert not any(fnmatch(folder, pattern) for pattern in left_out), file


def test_make_processes_runs_what_is_slow():
    """Plain `pytest` says how many tests it deselects: `make processes` runs each of them once."""
    assert "pytest -m slow\n" in (ROOT / "Makefile").read_text()


def test_modules_of_tests_have_one_name_each():
    """They are imported by their bare names; programs called `run` are imported nowhere."""
    names = Counter(path.stem for path in TESTS.rglob("*.py"))
    assert [name for name, count in names.items() if count > 1] == ["run"]
    outside = re.compile(r"^(?:from|import) tests\b", re.M)  # of whichever checkout comes first
    assert not [path for path in TESTS.rglob("*.py") if outside.search(path.read_text())]


@pytest.mark.parametrize(
    ("addition", "words"),
    [
        ("A style", r'\bFeatures\b|\bFeaturesParallel\b|"features"'),
        ("An operation", r"\bShareLongestPosition\b|\buse_longest_position\b"),
    ],
)
def test_the_tour_names_every_file_that_an_addition_takes(addition, words):
    tour = (PACKAGE.parent / "docs" / "tour.md").read_text()
    listed = tour.partition(f"- **{addition}**")[2].partition("It also takes")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", listed))
    assert len(named) >= 4
    found = {str(f.relative_to(PACKAGE)) for f in FILES if re.search(words, f.read_text())}
    assert named == found
