"""Words that the text, the diff and the script share: sizes, shapes, and names put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops import styles as ir
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.fsdp import FullyShard, Prefetch, Spread
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.megatron_fsdp import MegatronShard
from planc.ops.quantization import Quantize
from planc.ops.tensor_parallel import Shape

_BRACES = 40  # columns of a name with braces, before it is two

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def size(count: int) -> str:
    """Bytes for a person: `27.3 MiB`."""
    value = float(count)
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units:
        # what would be rounded up to 1024.0 is better said in the next unit
        if unit == units[-1] or value < (1024 if unit == "B" else 1023.95):
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:,.1f} {unit}"


def alike(old: object, new: object) -> bool:
    """Whether two numbers of bytes read the same, rounded."""
    return isinstance(old, int) and isinstance(new, int) and size(old) == size(new)


def sizes(old: int, new: int) -> tuple[str, str]:
    """Two numbers of bytes, exact where rounding would make them the same."""
    texts = size(old), size(new)
    if old != new and texts[0] == texts[1]:
        return f"{old:,} B", f"{new:,} B"
    return texts


def shape(of: Shape) -> str:
    return f"{list(of.shape)} -> {list(of.local)}"


def shapes(of: Sequence[Shape]) -> str:
    """A weight's shape without its name, those of other parameters after it."""
    return ", ".join(shape(s) if s.name == "weight" else f"{s.name} {shape(s)}" for s in of)


def axes(names: Iterable[str], lowered: Lowered) -> str:
    """`dp_shard * cp = 8`."""
    names = list(names)
    return f"{' * '.join(names)} = {lowered.axis_size(*names):,}"


def flow(style: ir.Style) -> str:
    """The layouts of a style where they are not torch's own, as a plan writes them in brackets.

    What a module hands on is a DTensor or a rank's own part; where that is not the style's
    default, `dtensor` or `local` says so.
    """
    default = ir.local_default(style)
    local = getattr(style, "local", default)
    layouts = ir.style_arguments(_with_local(style, default) if local != default else style)
    kept = "" if local == default else "local" if local else "dtensor"
    return ", ".join(filter(None, (layouts, kept)))


def _with_local(style: ir.Style, local: bool) -> ir.Style:
    assert isinstance(
        style, ir.Colwise | ir.Rowwise | ir.Sequence | ir.Input | ir.Output | ir.Experts
    )
    return replace(style, local=local)


def precision(op: FullyShard) -> str:
    """What a unit computes in and what its gradients are summed in."""
    words = []
    if op.param:
        words.append(f"parameters {dtype(op.param)}")
    if op.reduce:
        words.append(f"gradients {dtype(op.reduce)}")
    if op.output:
        words.append(f"output {dtype(op.output)}")
    text = ", ".join(words) or "no mixed precision"
    return text if op.cast_inputs else f"{text}, inputs not cast"


def spread(op: FullyShard | Spread, lowered: Lowered) -> str:
    """The axes that a unit is split and copied over."""
    if not op.shard:
        return f"on {axes(op.replicate, lowered)}"
    text = f"on {axes(op.shard, lowered)}"
    return text + (f", replicated over {axes(op.replicate, lowered)}" if op.replicate else "")


def megatron(op: MegatronShard, lowered: Lowered) -> str:
    """The axes, the strategy and the types of a model that Megatron-FSDP shards."""
    parts = [f"on {axes(op.shard, lowered)}"]
    if op.replicate:
        outer = f", {op.outer}" if op.outer != "no_shard" else ""
        parts.append(f"replicated over {axes(op.replicate, lowered)}{outer}")
    parts.append(op.strategy)
    kinds = (("optimizer", op.main_params), ("gradients", op.main_grads), ("sent", op.grad_comm))
    parts += [f"{name} {dtype(value)}" for name, value in kinds if value]
    parts += ["gradients summed"] if op.summed else []
    return ", ".join((*parts, *(f"{n} = {str(v).lower()}" for n, v in op.options)))


def offload(op: FullyShard) -> str:
    if not op.offload:
        return ""
    return f", offloaded to {'pinned' if op.pin else 'unpinned'} host memory"


def along(op: FullyShard | Spread) -> str:
    return f"split along dim {op.shard_dim}" if op.shard_dim else ""


def ahead(op: Prefetch) -> str:
    """How far a list of units gathers ahead."""
    ways = (("forward", op.forward), ("backward", op.backward))
    return ", ".join(f"{depth} ahead in {way}" for way, depth in ways if depth)


def dtype(name: str) -> str:
    return SHORT.get(name, name)


def recomputing(op: Checkpoint) -> str:
    """What a checkpoint keeps, and where: `full`, or `ops(save = [...], offload = cpu)`."""
    words = []
    if op.save:
        words.append(f"save = [{', '.join(saves(op))}]")
    if op.offload:
        words.append("offload = cpu")
    terms = (("pin", op.pin), ("preserve_rng", op.preserve_rng), ("early_stop", op.early_stop))
    words += [f"{name} = false" for name, value in terms if not value]
    kind = "ops" if op.save else "full"
    return f"{kind}({', '.join(words)})" if words else kind


def arrival(op: Load) -> str:
    """How weights arrive: `each rank reads its slices, kept in bf16, from meta`."""
    ways = {
        "slices": "each rank reads its own slices",
        "rank0": "rank 0 reads and sends",
        "checkpoint": "from a distributed checkpoint",
    }
    parts = [ways[op.weights]] if op.weights else []
    parts += [f"kept in {dtype(op.dtype)}{_except(op)}"] if op.dtype else []
    parts += ["built on meta"] if op.meta else []
    return ", ".join(parts) or "as the call says"


def _except(op: Load) -> str:
    return f" but for {', '.join(islands(op))} in fp32" if op.fp32 else ""


def islands(op: Load) -> list[str]:
    """The parameters that a cast leaves in float32, those of one module as one."""
    return together(map(str, op.fp32))


def saves(op: Checkpoint) -> tuple[str, ...]:
    """What a checkpoint keeps: `attention`, `matmul(every = 2)`."""
    return tuple(
        save.name if save.every == 1 else f"{save.name}(every = {save.every})" for save in op.save
    )


def reshard(value: bool | int) -> str:
    """What a unit does with its gathered parameters after forward."""
    if value is True:
        return "reshard after forward"
    return "keep" if value is False else f"reshard to {value} after forward"


def unit(op: FullyShard) -> str:
    """What a plan calls the unit."""
    paths = [str(m) for m in op.members]
    inner = together(p for p in paths if parent(p))
    names = ", ".join([*inner, *(p for p in paths if not parent(p))])
    return f"group({names})" if op.group else names


def layer(modules: Modules) -> Modules:
    """A layer by its own name, where peft's layer is around it."""
    inner = modules.path[-1:] == ("base_layer",)
    return Modules(modules.path[:-1], modules.module) if inner else modules


def adapter(path: str) -> tuple[str, str]:
    """(the layer, `.lora_A` or `.lora_B`) of a path inside an adapter; else (the path, nothing)."""
    for half in (".lora_A", ".lora_B"):
        if path.endswith(f"{half}.default"):
            return path.removesuffix(f"{half}.default"), half
    return path, ""


def number(value: float) -> str:
    return f"{value:g}"


def lora(op: Adapt) -> str:
    """What an adapter is, as a plan writes it in brackets; defaults of planc are left out."""
    parts = [f"rank {op.rank:,}", f"alpha {number(op.alpha)}"]
    parts += [f"dropout {number(op.dropout)}"] if op.dropout else []
    parts += [dtype(op.dtype)] if op.dtype else []
    parts += [f"init {op.init}"] if op.init != "default" else []
    return ", ".join(parts)


def four_bit(op: Quantize) -> str:
    """How weights are kept in 4 bits; defaults of planc are left out."""
    parts = [f"{op.kind} in {dtype(op.storage)}", f"blocks of {op.block:,}"]
    parts += ["scales quantised too"] if op.double else []
    parts += [f"computes in {dtype(op.compute)}"] if op.compute else []
    return ", ".join(parts)


def block(modules: Modules) -> str:
    """The repeated block that the modules are in, or empty: `model.layers[0:32]`."""
    at = [i for i, s in enumerate(modules.path) if isinstance(s, Indices)]
    if not at or at[-1] == len(modules.path) - 1:
        return ""
    return str(Modules(modules.path[: at[-1] + 1], modules.module))


def inside(modules: Modules) -> str:
    """The path of modules inside their block."""
    return str(modules).removeprefix(block(modules)).removeprefix(".")


def parent(path: str) -> str:
    """What `together` keys on: the path but for its last name; a path that ends in indices whole.

    `model.layers[0:32].mlp` and `model.layers[0:32].self_attn` have one parent.
    """
    return path if path.endswith("]") else path.rpartition(".")[0]


def together(paths: Iterable[str]) -> list[str]:
    """Paths whose last names alone differ, as one with braces: `mlp.{gate,up}_proj`.

    Each stands where the first of them stood.
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(parent(path), []).append(path)
    return [braced(chunk) for group in groups.values() for chunk in chunks(group)]


def chunks(paths: Sequence[str]) -> Iterator[list[str]]:
    """Paths of one parent in parts that are short enough for a line with braces."""
    chunk: list[str] = []
    for path in paths:
        if chunk and len(_braces([_last(p) for p in (*chunk, path)])) > _BRACES:
            yield chunk
            chunk = []
        chunk.append(path)
    yield chunk


def braced(paths: Sequence[str]) -> str:
    """Paths of one parent as one: `mlp.{gate,up}_proj`."""
    if len(paths) == 1:
        return paths[0]
    head = parent(paths[0])
    last = _braces([_last(p) for p in paths])
    return f"{head}.{last}" if head else last


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _braces(names: list[str]) -> str:
    """Names with what they share outside the braces, cut at an underscore: `{q,k,v}_proj`."""
    head = _common(names)
    head = head[: head.rfind("_") + 1]
    tail = _common([n[::-1] for n in names])[::-1]
    tail = tail[tail.find("_") :] if "_" in tail else ""
    if any(len(head) + len(tail) >= len(n) for n in names):
        head = tail = ""
    inner = ",".join(n[len(head) : len(n) - len(tail)] for n in names)
    return f"{head}{{{inner}}}{tail}"


def _common(names: list[str]) -> str:
    """The letters that all names begin with."""
    letters = []
    for column in zip(*names, strict=False):
        if len(set(column)) > 1:
            break
        letters.append(column[0])
    return "".join(letters)


def table(
    rows: Iterable[Sequence[str]], indent: str = "  ", *, widest: Sequence[int] = ()
) -> list[str]:
    """Rows in aligned columns, without spaces at the end.

    Args:
        rows: cells, as many in each; after the last that is not empty a row ends, and that cell
            may be as long as it likes. A column without any text takes no room.
        indent: what each line begins with.
        widest: for each column, the columns of text after which a cell moves its own row on,
            and no other.
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
