"""Pieces of Python source, laid out as a formatter would: imports, calls, styles.

What does not fit on a line is broken with one item a line and a comma after the last, which
formatters leave as it is whatever their line length.
"""

from __future__ import annotations

import ast
import json
import keyword
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import assert_never

from planc.ops import styles as ir

WIDTH = 88  # the default of ruff and black

_STANDARD: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("functools", ("partial", "wraps")),
    ("itertools", ("product",)),
    ("math", ("prod",)),
    ("pathlib", ("Path",)),
)
_PARALLEL = "torch.distributed.tensor.parallel"
_IMPORTS = (
    ("bitsandbytes", ("matmul_4bit",)),
    ("bitsandbytes.functional", ("quantize_4bit",)),
    ("peft", ("LoraConfig", "inject_adapter_in_model")),
    ("safetensors", ("safe_open",)),
    ("torch", ("distributed", "nn")),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        ("CheckpointImpl", "checkpoint_wrapper"),
    ),
    ("torch.distributed.checkpoint", ("FileSystemReader", "load")),
    (
        "torch.distributed.checkpoint.metadata",
        ("ChunkStorageMetadata", "MetadataIndex", "TensorProperties"),
    ),
    (
        "torch.distributed.checkpoint.planner",
        ("TensorWriteData", "WriteItem", "WriteItemType"),
    ),
    ("torch.distributed.device_mesh", ("DeviceMesh", "init_device_mesh")),
    (
        "torch.distributed._composable.replicate_with_fsdp",
        ("replicate",),
    ),
    ("torch.distributed.fsdp", ("CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy")),
    ("torch.distributed.fsdp", ("fully_shard",)),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_common",
        ("FSDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult"),
    ),
    ("torch.distributed.tensor", ("DTensor", "Partial", "Replicate", "Shard")),
    ("torch.distributed.tensor", ("distribute_module", "distribute_tensor")),
    ("torch.distributed.tensor._utils", ("compute_local_shape_and_global_offset",)),
    (_PARALLEL, ("ColwiseParallel", "ParallelStyle")),
    (_PARALLEL, ("PrepareModuleInput", "PrepareModuleOutput")),
    (_PARALLEL, ("RowwiseParallel", "SequenceParallel", "parallelize_module")),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Something in brackets that can be broken over lines: a call, a list, a dictionary.

    Args:
        head: what stands before the items, with the opening bracket.
        items: in order.
        close: the closing bracket.
        notes: a comment for each item; a group with notes is broken always.
    """

    head: str
    items: tuple[Source, ...]
    close: str = ")"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.head}{', '.join(str(i) for i in self.items)}{self.close}"


Source = str | Group


def lay(source: Source, indent: str = "", *, note: str = "", end: str = "") -> Iterator[str]:
    """Lines of source, a comment behind them or, where that is too far right, above them.

    Args:
        source: a statement or an item of one.
        indent: what stands before each line.
        note: the comment's text, or nothing.
        end: a comma, for an item.
    """
    flat = f"{indent}{source}{end}"
    broken = isinstance(source, Group) and source.items and (source.notes or len(flat) > WIDTH)
    beside = f"{flat}  # {note}" if note else flat
    if len(beside) <= WIDTH and not broken:
        yield beside
        return
    if note:
        yield f"{indent}# {note}"
    if not broken or isinstance(source, str):
        yield flat
        return
    yield f"{indent}{source.head}"
    for item, about in zip(source.items, source.notes or ("",) * len(source.items), strict=True):
        yield from lay(item, f"{indent}    ", note=about, end=",")
    yield f"{indent}{source.close}{end}"


def assign(target: str, value: str, indent: str = "") -> Iterator[str]:
    """An assignment, its right side in brackets where it is too long."""
    line = f"{indent}{target} = {value}"
    if len(line) <= WIDTH:
        yield line
        return
    yield from (f"{indent}{target} = (", f"{indent}    {value}", f"{indent})")


def remark(text: str) -> str:
    """The text of a comment, on one line whatever it was."""
    return "".join(c if c.isprintable() else "?" for c in text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def attribute(name: str) -> bool:
    """Whether `module.name` is Python."""
    return name.isidentifier() and not keyword.iskeyword(name)


def imports(body: str, own: Iterable[str] = ()) -> str:
    """The imports that a body needs, in order.

    Args:
        body: what follows them.
        own: modules of the user's.
    """
    used_names = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    lines = [f"import {name}" for name in ("contextlib", "json", "re") if name in used_names]
    for module, those in _STANDARD:
        some = ", ".join(n for n in those if n in used_names)
        lines += [f"from {module} import {some}"] if some else []
    lines += [""] if lines else []
    plain = {*own, *(used_names & {"torch", "megatron_fsdp"})}
    lines += [f"import {name}" for name in sorted(plain)]
    found: dict[str, list[str]] = {}
    for module, names in _IMPORTS:
        found.setdefault(module, []).extend(n for n in names if n in used_names)
    for module, used in found.items():
        line = f"from {module} import {', '.join(used)}"
        if used and len(line) <= WIDTH:
            lines.append(line)
        elif used:
            lines += [f"from {module} import (", *(f"    {n}," for n in used), ")"]
    return "\n".join(lines) + "\n"


def style_source(style: ir.Style, head: str = "") -> Group:
    """The call of a style, torch's or of a definition that is inlined; defaults are left out.

    Args:
        style: of the plan.
        head: what stands before the call.
    """
    match style:
        case ir.Colwise() | ir.Rowwise():
            return _weighted(style, head)
        case ir.Sequence():
            arguments = [f"sequence_dim={style.dim}"] if style.dim != 1 else []
            return _call("SequenceParallel", style, arguments, head)
        case ir.Input():
            arguments = _sides("input_layouts", "desired_input_layouts", style.positional)
            return _call("PrepareModuleInput", style, [*arguments, *_named(style)], head)
        case ir.Output():
            arguments = _sides("output_layouts", "desired_output_layouts", style.positional)
            return _call("PrepareModuleOutput", style, arguments, head)
        case ir.Replicated():
            return Group(f"{head}SummedGradient(", ())
        case ir.MlaKv():
            return Group(f"{head}RotaryGradient(", (str(style.rope),))
        case ir.Parameters() | ir.Experts():
            return _bare(style, head)
        case ir.Features():
            return Group(f"{head}FeaturesParallel(", ())
        case ir.Attributes():
            return Group(f"{head}DividedAttributes(", tuple(map(quoted, style.names)))
        case ir.Custom():
            given = tuple(f"{name}={_value(value)}" for name, value in style.arguments)
            return Group(f"{head}{style.path.replace(':', '.')}(", given)
        case _:
            assert_never(style)


def _call(
    name: str,
    style: ir.Colwise | ir.Rowwise | ir.Sequence | ir.Input | ir.Output,
    arguments: list[str],
    head: str,
) -> Group:
    if style.local != ir.local_default(style):
        arguments = [*arguments, f"use_local_output={style.local}"]
    return Group(f"{head}{name}(", tuple(arguments))


def _weighted(style: ir.Colwise | ir.Rowwise, head: str) -> Group:
    name = "ColwiseParallel" if isinstance(style, ir.Colwise) else "RowwiseParallel"
    default = type(style)()
    arguments: list[str] = []
    if style.input != default.input:
        arguments.append(f"input_layouts={_layout(style.input)}")
    if style.output != default.output:
        arguments.append(f"output_layouts={_layout(style.output)}")
    parts = 1 if style.interleaved else style.parts
    if not style.transposed and parts == 1:
        return _call(name, style, arguments, head)
    outer = "TransposedParallel" if style.transposed else "PackedParallel"
    inner: list[Source] = [_call(name, style, arguments, "")]
    if parts != 1:
        inner.append(f"parts={_sizes(parts)}")
    return Group(f"{head}{outer}(", tuple(inner))


def _value(value: ir.Literal) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return quoted(value) if isinstance(value, str) else repr(value)


def _sizes(parts: ir.Parts) -> str:
    return str(parts if isinstance(parts, int) else list(parts))


def _bare(style: ir.Bare, head: str) -> Group:
    held = tuple(f"{quoted(name)}: {_layout(h.layout)}" for name, h in style.held)
    arguments: list[Source] = [Group("{", held, "}")]
    packed = tuple(
        f"{quoted(name)}: {_sizes(h.parts)}"
        for name, h in style.held
        if h.parts != 1 and not h.interleaved
    )
    if isinstance(style, ir.Experts):
        left = style.output in (ir.Partial(), ir.Shard(-1))
        arguments.append(f"input_layout={_layout(style.input)}")
        arguments.append(f"output_layout={None if left else _layout(style.output)}")
        if not style.local:
            arguments.append("use_local_output=False")
    if packed:
        arguments.append(Group("parts={", packed, "}"))
    name = "ExpertsParallel" if isinstance(style, ir.Experts) else "BareParallel"
    return Group(f"{head}{name}(", tuple(arguments))


def _named(style: ir.Input) -> Iterator[str]:
    if not style.named:
        return
    for argument, side in (("input_kwarg_layouts", 0), ("desired_input_kwarg_layouts", 1)):
        pairs = (f"{quoted(n)}: {_layout((c.source, c.target)[side])}" for n, c in style.named)
        yield f"{argument}={{{', '.join(pairs)}}}"


def _sides(arrives: str, wanted: str, changes: tuple[ir.Change | None, ...]) -> list[str]:
    if not changes:
        return []
    before = ", ".join(_layout(c.source) if c else "None" for c in changes)
    after = ", ".join(_layout(c.target) if c else "None" for c in changes)
    comma = "," if len(changes) == 1 else ""
    return [f"{arrives}=({before}{comma})", f"{wanted}=({after}{comma})"]


def _layout(layout: ir.Layout) -> str:
    match layout:
        case ir.Replicate():
            return "Replicate()"
        case ir.Shard():
            return f"Shard({layout.dim})"
        case ir.Partial():
            return "Partial()"
