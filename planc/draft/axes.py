"""Further axes of a drafted plan: stages of a pipeline, parts of sequences, divided experts."""

from collections.abc import Iterable, Iterator, Mapping

from planc.diagnostic import Sink
from planc.plan.mesh_axes import CONTEXT, EXPERTS, STAGES
from planc.plan.settings import MICROBATCHES

AXES = (STAGES, CONTEXT, EXPERTS)
Rules = dict[str, dict[str, str]]


def wanted(settings: Iterable[str], sink: Sink) -> dict[str, int]:
    """The sizes above one of `NAME=SIZE`; PL106 for another name, PL012 for no size."""
    found: dict[str, int] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in AXES:
            known = "it can set pp, cp and ep"
            sink.error("PL106", f"`--set {name}` names no axis of a drafted plan", help=known)
        elif not value.isdecimal() or int(value) < 1:
            sink.error("PL012", f"`{name}` is a positive number, not `{value}`")
        elif int(value) > 1:
            found[name] = int(value)
    return found


def mesh(sizes: Mapping[str, int], *, tensor: bool) -> list[str]:
    """The lines of the mesh, outermost axis first."""
    own = {name: f"    {name} = {size}" for name, size in sizes.items()}
    around = ["    dp_replicate = 1", "    dp_shard = auto", own.get(CONTEXT, "")]
    inner = ["    tp = 1"] if tensor else []
    return [x for x in (own.get(STAGES, ""), *around, *inner, own.get(EXPERTS, "")) if x]


def experts(rules: Rules) -> Iterator[str]:
    """The modules with fused experts, by the style that shards them."""
    for path, some in rules.items():
        for name, style in some.items():
            if style.startswith("experts("):
                yield f"{path}.*.{name}" if path else name


def undivided(rules: Rules) -> Rules:
    """Rules without those that shard each expert, which no rank then holds whole."""
    return {
        path: {name: style for name, style in some.items() if not style.startswith("experts(")}
        for path, some in rules.items()
    }


def sections(sizes: Mapping[str, int], blocks: str, divided: Iterable[str]) -> Iterator[str]:
    """The sections of the axes.

    Args:
        sizes: of the axes above one.
        blocks: the list of blocks that a pipeline is cut in.
        divided: the modules with experts.
    """
    if STAGES in sizes:
        yield "pipeline on pp {"
        yield f"    {MICROBATCHES.word} = {MICROBATCHES.default}"
        yield from (f"    stages = even({blocks}.*)", "}", "")
    if CONTEXT in sizes:
        yield from ("context on cp {", "    attention = all_gather", "}", "")
    if EXPERTS in sizes:
        yield "expert on ep {"
        yield from (*(f"    {name} : dispatch(all_to_all)" for name in divided), "}", "")
