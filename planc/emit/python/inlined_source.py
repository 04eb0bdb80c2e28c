"""The definitions that a script inlines because torch lacks them.

They are read as text from the files that `apply` imports, so a script computes the same as `apply`
and needs torch only. Annotations are removed: they use names that a script does not import.
"""

import ast
import symtable
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from planc.emit.python.layout import Bracketed, lay
from planc.sections import BACKENDS, FOLDER, NAMES

_STANDALONE = Path(__file__).resolve().parents[2] / "runtime" / "standalone"
_COMPAT = "planc.compat."
_FILES = (
    "tensor_styles.py",
    "fsdp.py",
    "passes.py",
    "activation_checkpoint.py",
    "shards.py",
    "lora.py",
    "lora_init.py",
    "lora_experts.py",
    "safetensors_files.py",
    "dequantize.py",
    "buffers.py",
    "dcp_chunks.py",
    "load_weights.py",
    *(
        str(file)
        for name in (*BACKENDS.values(), *NAMES)
        if (file := FOLDER / name / "standalone.py").is_file()
    ),
    "loss.py",
    "expert_parallel.py",
    "expert_capacity.py",
    "collectives.py",
    "context_fused.py",
    "context_ring.py",
    "context_tokens.py",
    "context_positions.py",
    "documents.py",
    "context_states.py",
    "context_exchange.py",
    "context.py",
    "context_rows.py",
    "context_images.py",
    "context_blocks.py",
    "context_patches.py",
    "configuration.py",
    "images.py",
    "pipeline_images.py",
    "pipeline_values.py",
    "pipeline_messages.py",
    "pipeline.py",
    "pipeline_schedule.py",
    "pipeline_step.py",
    "towers.py",
    "rotary.py",
    "divided_images.py",
    "clipping.py",
    "kept_states.py",
    "adafactor.py",
    "own_optimizer.py",
    "optimizer.py",
)


def needed_definitions(body: str) -> list[str]:
    """The definitions that Python source needs, directly or through others, in file order.

    Args:
        body: Python source that may call definitions in these files.

    Returns:
        The source of each, with a trailing newline.
    """
    known = definitions()
    wanted: set[str] = set()
    waiting = [global_names(body)]
    while waiting:
        for name in waiting.pop() & known.keys() - wanted:
            wanted.add(name)
            waiting.append(global_names(known[name]))
    return [f"{source}\n" for name, source in known.items() if name in wanted]


@cache
def imported_names() -> dict[str, str]:
    """The names that the definitions import, each with its module; empty for a module."""
    modules: dict[str, str] = {}
    for text in _texts():
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import):
                modules |= {alias.name: "" for alias in node.names if "." not in alias.name}
            if isinstance(node, ast.ImportFrom) and node.module and node.module[:5] != "planc":
                modules |= {alias.name: node.module for alias in node.names}
    return modules


@cache
def definitions() -> dict[str, str]:
    """The source of each standalone function, class and constant, without annotations."""
    sources: dict[str, str] = {}
    for text in map(without_types, _texts()):
        lines = text.splitlines()
        for node in ast.parse(text).body:
            match node:
                case (
                    ast.FunctionDef(name=name)
                    | ast.ClassDef(name=name)
                    | ast.Assign(targets=[ast.Name(id=name)])
                ):
                    sources[name] = "\n".join(lines[_first_line(node) : node.end_lineno])
    return sources


@cache
def _texts() -> tuple[str, ...]:
    return tuple(
        library_imports((_STANDALONE / file).read_text(encoding="utf-8")) for file in _FILES
    )


def library_imports(text: str) -> str:
    """Source that imports the names of `planc.compat` from the libraries that have them."""
    lines = text.splitlines()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        if (node.module or "").startswith(_COMPAT):
            indent = " " * node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in _direct(node)]
    return "\n".join(lines) + "\n"


def _direct(node: ast.ImportFrom) -> Iterator[str]:
    """The statements in place of one that imports from `planc.compat`, by module."""
    homes = _library_names((node.module or "").removeprefix(_COMPAT))
    names_by_module: dict[str, list[str]] = {}
    for alias in node.names:
        home, name = homes[alias.name]
        names_by_module.setdefault(home, []).append(
            name if name == alias.name else f"{name} as {alias.name}"
        )
    yield from (
        f"from {home} import {', '.join(names)}" for home, names in sorted(names_by_module.items())
    )


@cache
def _library_names(file: str) -> dict[str, tuple[str, str]]:
    """The module and the name there of each name that a file of `planc.compat` imports."""
    text = (_STANDALONE.parents[1] / "compat" / f"{file}.py").read_text(encoding="utf-8")
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in nodes
        for alias in node.names
    }


def global_names(source: str) -> set[str]:
    """The names that source uses and that no function in it binds."""
    unbound: set[str] = set()
    tables = [symtable.symtable(source, "script", "exec")]
    while tables:
        table = tables.pop()
        outermost = table.get_type() == "module"
        unbound |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if (symbol.is_referenced() if outermost else symbol.is_global())
        }
        tables += table.get_children()
    return unbound


# Types -------------------------------------------------------------------------------------------


def without_types(text: str) -> str:
    """Python source without annotations; all else stays, comments included.

    Args:
        text: fully typed: a function without a return annotation is left alone, and an annotation
            is on the line of its name.
    """
    lines = text.splitlines()
    for first, last, new in sorted(_edits(text, lines), reverse=True):
        lines[first:last] = new
    return "\n".join(lines) + "\n"


def _edits(text: str, lines: list[str]) -> Iterator[tuple[int, int, list[str]]]:
    """(first line, line after the last, replacement lines) of each statement with annotations."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(returns=ast.expr(end_lineno=last)):
                yield node.lineno - 1, last or 0, list(_head(node, text))
            case ast.AnnAssign(value=ast.expr(), lineno=at, target=target, annotation=kind):
                line = lines[at - 1].encode()  # ast counts bytes
                kept = line[: target.end_col_offset] + line[kind.end_col_offset :]
                yield at - 1, at, [kept.decode()]
            case ast.ClassDef(body=body):
                for field, after in pairwise(body):
                    if isinstance(field, ast.AnnAssign) and field.value is None:
                        yield _first_line(field), _first_line(after), []


def _head(node: ast.FunctionDef, text: str) -> Iterator[str]:
    """The signature of a function without annotations, laid out as a formatter would."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    given: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    pairs = [*zip(plain, [*given, *args.defaults], strict=True)]
    after = [*zip(args.kwonlyargs, args.kw_defaults, strict=True)]

    def spell_arguments(
        defaults: Iterable[tuple[ast.arg, ast.expr | None]],
    ) -> Iterator[str]:
        for argument, default in defaults:
            value = default and f"={ast.get_source_segment(text, default)}"
            yield f"{argument.arg}{value or ''}"

    items = [*spell_arguments(pairs)]
    items[len(args.posonlyargs) : len(args.posonlyargs)] = ["/"] if args.posonlyargs else []
    if args.vararg or args.kwonlyargs:
        items.append(f"*{args.vararg.arg if args.vararg else ''}")
    items += spell_arguments(after)
    items += [f"**{args.kwarg.arg}"] if args.kwarg else []
    yield from lay(Bracketed(f"def {node.name}(", tuple(items), "):"), " " * node.col_offset)


def _first_line(node: ast.stmt) -> int:
    """The index of a statement's first line, decorators included."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
