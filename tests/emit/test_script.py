"""The emitted Python: laid out as a formatter would, torch alone, safe whatever names there are.

That it computes what `planc.apply` computes, bit for bit, is for tests on processes.
"""

import ast
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import distributed, nn

import planc
from planc.diagnostics.source import Span
from planc.emit.python.layout import WIDTH
from planc.emit.python.script import render
from planc.ops.document import digest
from planc.sections.compile.ops import Compile

EVERYTHING = """plan everything for llama
mesh {
    cp = 2
    dp_replicate = 2
    dp_shard = 2
    tp = 2
}
context on cp {
    attention = script
}
tensor on tp {
    model.layers[0:4].self_attn.{q,k,v}_proj : colwise
    model.layers[0:4].self_attn.o_proj : rowwise(-> partial)
    model.layers[0:4].self_attn.o_proj : output(partial -> replicate)
    model.layers[0:4].mlp : input(replicate -> replicate)
    model.layers[::2].mlp.{gate,up}_proj : colwise
    model.layers[::2].mlp.down_proj : rowwise
}
load {
    init = meta
    weights = slices
    dtype = bf16
}
checkpoint {
    model.layers[0:10].mlp : full
    model.layers[11] : full
    model.layers[12] : ops(save = [attention, matmul(every = 2)])
    model.layers[14] : full(offload = cpu, pin = false)
    model.layers[13] : ops(save = ["aten.mm.default"], offload = cpu, early_stop = false)
}
compile {
    model.layers[::3] : block
}
fsdp on dp_shard * cp, replicate on dp_replicate {
    precision(param = bf16, reduce = fp32)
    model.layers[0:4].mlp : unit(reshard = 2, precision(param = fp16))
    model.layers.* : unit
    group(model.embed_tokens, model.norm, lm_head) : unit(reshard = never)
    root : unit
}
"""

CASES = [
    ("llama-3.1-8b", "llama", 64, ["tp=8"]),
    ("llama-3.1-8b", "llama", 64, ["tp=8", "sequence=false", "recompute=false"]),
    ("llama-3.2-1b", "llama", 8, ["tp=2", "dp_replicate=2"]),
    ("gemma-3-1b", "gemma3", 8, []),
    ("phi-4", "phi3", 4, ["tp=2"]),
    ("qwen3-8b", "qwen3", 4, ["tp=4"]),
    ("mixtral-8x7b", "mixtral", 8, ["tp=2"]),
    ("gpt2", "gpt2", 2, ["param_dtype=fp32", "reduce_dtype=fp32"]),
]


def written(lowered):
    return render(lowered, digest=digest(lowered))


def ruff(source, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "--isolated", "-"],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )


LOADING = {"contextlib", "json", "pathlib", "re", "safetensors"}


def well_made(source):
    """What every emitted file is."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {a.name.partition(".")[0] for a in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported - {"functools", "itertools", "math"} - LOADING == {"torch"}
    assert bool(imported & LOADING) == ("def read_" in source)
    formatted = ruff(source, "format", "--diff")
    assert formatted.returncode == 0, formatted.stdout
    checked = ruff(source, "check", "--select", "E,F,I,B,UP,SIM,RUF,ARG")
    assert checked.returncode == 0, checked.stdout
    assert all(len(line) <= WIDTH for line in source.splitlines())


@pytest.mark.parametrize(("model", "plan", "world", "settings"), CASES)
def test_it_is_well_made(model, plan, world, settings):
    lowered = planc.lower(model, plan, world_size=world, overrides=settings)
    source = written(lowered)
    assert source == written(lowered)
    well_made(source)


@pytest.fixture
def everything(tmp_path):
    path = tmp_path / "e.plan"
    path.write_text(EVERYTHING)
    return path


def test_every_construct(everything, monkeypatch):
    monkeypatch.chdir(everything.parent)
    lowered = planc.lower("llama-3.2-1b", "e.plan", world_size=16)
    source = written(lowered)
    well_made(source)
    for text in (
        "for i in range(0, 16, 3):  # e.plan:",
        "for i in range(0, 10):",
        "for block in model.model.layers:",
        'cp_dp_shard_mesh = mesh["cp", "dp_shard"]._flatten("cp_dp_shard")',
        'hsdp_mesh = DeviceMesh._concatenate([mesh["dp_replicate"], cp_dp_shard_mesh])',
        "policy_1 = MixedPrecisionPolicy(param_dtype=torch.float16)",
        "checkpoint_fn=offloading(pin=False)",
        'context_fn=saving_on_cpu(True, (1, ("aten.mm.default",)))',
        "early_stop=False",
        "class _Park(",
        "**fsdp_1, reshard_after_forward=2)",
    ):
        assert text in source


def test_a_name_of_a_file_stays_in_its_comment(everything):
    lowered = planc.lower("llama-3.2-1b", str(everything), world_size=16)
    ops = tuple(
        replace(op, origin=Span.from_place('x\nimport os\r"""\u2028exit()')) for op in lowered.ops
    )
    source = written(lowered.map_ops(lambda _: ops))
    assert ast.dump(ast.parse(source)) == ast.dump(
        ast.parse(written(lowered.map_ops(lambda _: ops)))
    )
    names = {n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name)}
    assert not names & {"os", "exit"}
    assert [line for line in source.split("\n") if "exit()" in line and "#" not in line] == []


def test_operations_in_another_order_stay_in_it(everything):
    """The order of the list is what `apply` runs, so the functions follow it."""
    lowered = planc.lower("llama-3.2-1b", str(everything), world_size=16)
    early = [op for op in lowered.ops if isinstance(op, Compile)]
    source = written(lowered.map_ops(lambda _: (*early, *lowered.ops)))
    body = ast.parse(source).body[-1]
    calls = [
        n.value.func.id for n in body.body if isinstance(n, ast.Expr) and hasattr(n.value, "func")
    ]
    stages = ["prepare", "tensor_parallel", "checkpoint", "compile_blocks_2", "shard"]
    assert calls == ["compile_blocks", "configure", *stages, "keep_class_names"]


@pytest.mark.parametrize(
    ("way", "has", "lacks"),
    [
        ("full", "checkpoint_wrapper", "def saving"),
        ("ops(save = [reduce])", "def saving(*groups):", "offloading"),
        ("full(offload = cpu)", "def offloading(pin, **options):", "def saving"),
        ("full(preserve_rng = false)", "preserve_rng_state=False", "offloading"),
    ],
)
def test_a_script_holds_the_helpers_that_it_calls(tmp_path, way, has, lacks):
    path = tmp_path / "c.plan"
    units = "mesh {\n dp_shard = auto\n}\nfsdp on dp_shard {\n root : unit\n}\n"
    path.write_text(f"plan c for llama\n{units}checkpoint {{\n model.layers.* : {way}\n}}\n")
    source = written(planc.lower("llama-3.2-1b", str(path), world_size=4))
    well_made(source)
    assert has in source and lacks not in source


class Untyped(ast.NodeTransformer):
    """Leaves annotations out of a tree, as the emitter leaves them out of the text."""

    def visit_FunctionDef(self, node):
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_AnnAssign(self, node):
        if node.value is None:
            return None
        return ast.Assign(targets=[node.target], value=node.value)


def test_a_script_that_dequantizes_defines_what_it_calls(tmp_path):
    path = tmp_path / "fp8.plan"
    load = "load {\n    weights = slices\n    dequantize = fp8\n}\n"
    path.write_text(f'plan fp8 for llama\nextend "llama.plan"\n{load}')
    well_made(written(planc.lower("llama-3.1-8b", str(path), world_size=8)))


def dumped(node):
    return ast.dump(Untyped().visit(node))


def test_the_helpers_are_the_runtimes(everything):
    """The same trees but for types, docstrings too, so that the script does what `apply` does."""
    from pathlib import Path

    source = written(planc.lower("llama-3.2-1b", str(everything), world_size=16))
    emitted = {n.name: ast.dump(n) for n in ast.parse(source).body if hasattr(n, "name")}
    package = Path(planc.__file__).parent
    files = [*package.glob("runtime/standalone/*.py"), *package.glob("sections/*/standalone.py")]
    there = [n for file in files for n in ast.parse(file.read_text()).body]
    right = {n.name: dumped(n) for n in there if hasattr(n, "name")}
    shared = emitted.keys() & right.keys()
    saving = {"saving", "saving_on_cpu", "offloading", "_Keep", "_Park", "_Fetch"}
    assert shared >= saving | {"match_tensors", "read_slices", "slices_of", "materialize"}
    assert {name: emitted[name] for name in shared} == {name: right[name] for name in shared}


def test_definitions_without_types_are_laid_out_as_a_formatter_would(tmp_path):
    from planc.emit.python.inlined_source import definitions

    for name, source in definitions().items():
        (tmp_path / f"{name}.py").write_text(f"{source}\n")
        assert all(len(line) <= WIDTH for line in source.splitlines()), name
    command = [sys.executable, "-m", "ruff", "format", "--diff", "--isolated", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(definitions())} files already formatted" in done.stderr


def test_comments_and_strings_stay_where_types_go():
    from planc.emit.python.inlined_source import without_types

    source = """
class Some:
    size: int
    names: dict[str, tuple[int, ...]]

    def run(self, a: int, /, b: str = "x: int", *c: int, d: int | None = None, **e: str) -> int:
        # here: a comment
        found: list[int] = [a]  # of: numbers

        def inner(*, key: str) -> str:
            return f"{key}: {b}"

        return found[0]
"""
    assert (
        without_types(source)
        == """
class Some:
    def run(self, a, /, b="x: int", *c, d=None, **e):
        # here: a comment
        found = [a]  # of: numbers

        def inner(*, key):
            return f"{key}: {b}"

        return found[0]
"""
    )


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)


class Odd(nn.Module):
    """Children with names that a careless script would trip over."""

    def __init__(self):
        super().__init__()
        self.block = nn.ModuleList([Inner() for _ in range(3)])
        self.mesh = Inner()
        self.parts = nn.ModuleDict({"0": Inner(), "class": Inner(), "up-and-down": Inner()})
        self.rows = nn.ModuleList([nn.ModuleList([Inner() for _ in range(3)]) for _ in range(2)])
        self.other = nn.Linear(8, 8)
        self.other.weight = self.parts["0"].up.weight


ODD = """plan odd for Odd
mesh {
    model = 2
    fsdp = 2
}
tensor on model {
    block.*.up : colwise
    block.*.down : rowwise
    mesh.up : colwise
    mesh.down : rowwise
    parts.*.up : colwise
    parts.*.down : rowwise
    rows[0:2][1:3].up : colwise
    rows[0:2][1:3].down : rowwise
    other : colwise
}
checkpoint {
    block.* : full
    parts.* : full
    rows.*.* : full
}
fsdp on fsdp {
    block.* : unit
    group(rows[0:2][1:3], mesh) : unit
    group(rows[0][0], rows[1][0]) : unit
    root : unit
}
"""


def hooks_of_the_plan(hooks):
    """The number of hooks but for those of safeguards, which scripts have none of."""
    functions = (getattr(hook, "__func__", hook) for hook in hooks.values())
    return sum(not str(f.__module__).startswith("planc.runtime.safeguards") for f in functions)


def kinds(model):
    """The places of parameters, and the classes and hooks of modules."""
    parameters = {
        name: (tuple(p.placements), p.device_mesh.mesh_dim_names, tuple(p.to_local().shape))
        for name, p in model.named_parameters()
    }
    hooks = {
        name: (
            type(m).__name__,
            hooks_of_the_plan(m._forward_pre_hooks),
            hooks_of_the_plan(m._forward_hooks),
        )
        for name, m in model.named_modules()
    }
    return parameters, hooks


def same_as_applied(source, lowered, one, two):
    """A script does to one model what `apply` does to another of the same class."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        planc.apply(one, lowered, device_type="cpu", compare=0)
        space = {}
        exec(compile(source, "script.py", "exec"), space)
        space["parallelize"](two, space["build_mesh"]("cpu"))
    finally:
        distributed.destroy_process_group()
    assert kinds(one) == kinds(two)


def test_odd_names_do_what_apply_does(tmp_path):
    path = tmp_path / "odd.plan"
    path.write_text(ODD)
    with torch.device("meta"):
        one, two = Odd(), Odd()
    lowered = planc.lower(one, str(path), world_size=4)
    source = written(lowered)
    ast.parse(source)
    same_as_applied(source, lowered, one, two)
    for model in (one, two):
        assert model.other.weight is model.parts["0"].up.weight
    assert ruff(source, "format", "--diff").returncode == 0
