"""Text that operations share: sizes, tables, and names merged with braces."""

from collections.abc import Iterable, Iterator, Sequence
from os.path import commonprefix
from typing import Any, Protocol

from planc.model.facts import Modules
from planc.model.indices import Indices


class AxisSizes(Protocol):
    """The sizes of mesh axes; a lowered plan has them."""

    def axis_size(self, *names: str) -> int: ...


_BRACES = 40  # width of a name with braces before it is split

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def size(count: int) -> str:
    """Bytes for a person: `27.3 MiB`."""
    value = float(count)
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units:
        # a value that rounds to 1024.0 is written in the next unit
        if unit == units[-1] or value < (1024 if unit == "B" else 1023.95):
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:,.1f} {unit}"


def alike(old: object, new: object) -> bool:
    """Whether two byte counts round to the same text."""
    return isinstance(old, int) and isinstance(new, int) and size(old) == size(new)


def sizes(old: int, new: int) -> tuple[str, str]:
    """Two byte counts as text, exact where rounding would make them equal."""
    texts = size(old), size(new)
    if old != new and texts[0] == texts[1]:
        return f"{old:,} B", f"{new:,} B"
    return texts


def axes(names: Iterable[str], mesh: AxisSizes | None = None) -> str:
    """`dp_shard * cp = 8`; only the names where no mesh is given."""
    names = list(names)
    size = f" = {mesh.axis_size(*names):,}" if mesh else ""
    return " * ".join(names) + size


def mesh(mesh_axes: Iterable[Any]) -> str:
    """`dp_shard 4 | tp 2`, of axes with a name and a size."""
    return " | ".join(f"{axis.name} {axis.size}" for axis in mesh_axes)


def value(of: Any) -> str:
    """The value of a field: `none`, `true`, `[8, 4]`, `bf16`."""
    if of is None or of == ():
        return "none"
    if isinstance(of, bool):
        return str(of).lower()
    return f"[{', '.join(map(str, of))}]" if isinstance(of, tuple) else dtype(str(of))


def literal(of: Any) -> str:
    if isinstance(of, tuple):
        return f"[{', '.join(map(literal, of))}]"
    return f'"{of}"' if isinstance(of, str) else str(of).lower().replace("none", "null")


def head(name: str, text: str) -> str:
    """A line with its title in the first column."""
    return f"{name:<12}{text}"


def listing(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """(title, path, note) rows as lines, merged where title and note are equal."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, path, note in rows:
        groups.setdefault((name, note), []).append(path)
    before = None
    for (name, note), paths in groups.items():
        for path in together(paths):
            yield head("" if name == before else name, f"{path}  {note}".rstrip())
            before = name


def dtype(name: str) -> str:
    return SHORT.get(name, name)


def layer(modules: Modules) -> Modules:
    """A layer by its name in the model: peft's `base_layer` is removed from the path."""
    inner = modules.path[-1:] == ("base_layer",)
    return Modules(modules.path[:-1], modules.module) if inner else modules


def adapter(path: str) -> tuple[str, str]:
    """(layer, `.lora_A`, `.lora_B` or `.lora_magnitude_vector`) of a path inside an adapter;
    (path, "") for any other.
    """
    for half in (".lora_A", ".lora_B", ".lora_magnitude_vector"):
        if path.endswith(f"{half}.default"):
            return path.removesuffix(f"{half}.default"), half
    return path, ""


def block(modules: Modules) -> str:
    """The path of the block in a list that contains the modules, or empty: `model.layers[0:32]`."""
    at = [i for i, s in enumerate(modules.path) if isinstance(s, Indices)]
    if not at or at[-1] == len(modules.path) - 1:
        return ""
    return str(Modules(modules.path[: at[-1] + 1], modules.module))


def path_in_block(modules: Modules) -> str:
    """The path of modules relative to their block."""
    return str(modules).removeprefix(block(modules)).removeprefix(".")


def parent(path: str) -> str:
    """The key of `together`: the path without its last name, or all of a path that ends in indices.

    `model.layers[0:32].mlp` and `model.layers[0:32].self_attn` have one parent.
    """
    return path if path.endswith("]") else path.rpartition(".")[0]


def together(paths: Iterable[str]) -> list[str]:
    """Paths that differ only in their last name, merged with braces: `mlp.{gate,up}_proj`.

    Each merged path is at the position of its first member.
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(parent(path), []).append(path)
    return [merge_paths(chunk) for group in groups.values() for chunk in chunks(group)]


def chunks(paths: Sequence[str]) -> Iterator[list[str]]:
    """Paths of one parent in groups whose braces fit on a line."""
    chunk: list[str] = []
    for path in paths:
        if chunk and len(_braces([_last(p) for p in (*chunk, path)])) > _BRACES:
            yield chunk
            chunk = []
        chunk.append(path)
    yield chunk


def merge_paths(paths: Sequence[str]) -> str:
    """Paths of one parent merged into one: `mlp.{gate,up}_proj`."""
    if len(paths) == 1:
        return paths[0]
    head = parent(paths[0])
    last = _braces([_last(p) for p in paths])
    return f"{head}.{last}" if head else last


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _braces(names: list[str]) -> str:
    """Names with what they share outside the braces, cut at an underscore: `{q,k,v}_proj`."""
    head = commonprefix(names)  # noqa: RUF071 - of letters
    head = head[: head.rfind("_") + 1]
    tail = commonprefix([n[::-1] for n in names])[::-1]  # noqa: RUF071
    tail = tail[tail.find("_") :] if "_" in tail else ""
    if any(len(head) + len(tail) >= len(n) for n in names):
        head = tail = ""
    inner = ",".join(n[len(head) : len(n) - len(tail)] for n in names)
    return f"{head}{{{inner}}}{tail}"


def table(
    rows: Iterable[Sequence[str]], indent: str = "  ", *, widest: Sequence[int] = ()
) -> list[str]:
    """Rows with aligned columns, without trailing spaces; columns without text are dropped.

    The last cell of a row has any length; a cell above `widest` shifts its row, and widens no
    column.
    """
    cut = [list(row) for row in rows]
    used = [any(column) for column in zip(*cut, strict=True)]
    cut = [[cell for cell, shown in zip(row, used, strict=True) if shown] for row in cut]
    for row in cut:
        while row and not row[-1]:
            row.pop()
    limits = dict(enumerate(widest))
    widths: dict[int, int] = {}
    for row in cut:
        for i, cell in enumerate(row[:-1]):
            if len(cell) <= limits.get(i, len(cell)):
                widths[i] = max(widths.get(i, 0), len(cell))
    return [
        indent + "  ".join(cell.ljust(widths.get(i, 0)) for i, cell in enumerate(row)).rstrip()
        for row in cut
    ]
