"""The pipeline section -> the stages of the model's blocks, and the schedule."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from planc.diagnostics.diagnostic import Sink, nearest
from planc.diagnostics.source import Span
from planc.elaborate.call_arguments import Arguments, unknown, word, wrong_value
from planc.elaborate.evaluate import evaluate, is_integer
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import Settings
from planc.elaborate.scope import Scope
from planc.elaborate.sections.schedule_file import ScheduleFileError, read_schedule
from planc.elaborate.sections.stage_sizes import balance_stages, even, work
from planc.elaborate.sections.word_settings import one_word, read_settings
from planc.elaborate.selectors import select
from planc.ir.nodes import EqualTimes, PipelineRule
from planc.ir.shared_parameters import cut_at
from planc.model.facts import Facts, Modules, generic
from planc.model.indices import Indices
from planc.model.layer_kinds import length
from planc.ops.base import AxisRole
from planc.ops.pipeline import SCHEDULES, TERMS, Copies, Pipeline
from planc.proxy.block_order import BlockOrder, block_order
from planc.syntax import ast

_SETTINGS = dict.fromkeys(("schedule", "microbatches", "stages"))
_EVEN = ("each", "first", "last", "by")
_EXAMPLE = "write `stages = even(model.layers.*)`"
_WAYS = {"even": _EVEN, "balanced": ("each", "rows", "seq"), "weighted": ("blocks",)}
"""The ways to make stages, and their arguments."""


class BlockCut(NamedTuple):
    """The list of blocks, the first one of each stage with their number, and how stages are timed,
    if so: until they are, as much work is in each.
    """

    blocks: Modules
    bounds: tuple[int, ...]
    times: EqualTimes | None = None


def pipeline(program: Program) -> PipelineRule | None:
    """The pipeline of the plan, None without one or where its axis has one rank."""
    section = next(iter(program.sections_named("pipeline")), None)
    if section is None:
        return None
    axis = _axis(section, program)
    if axis is None:
        return None
    settings, read = Settings(program.sink), partial(_value, program=program)
    for each in program.sections_named("pipeline"):
        read_settings(each, _SETTINGS, settings, program, "schedule = 1f1b", read=read)
    ranks = program.mesh.size(axis) if program.mesh else 1
    if ranks == 1:
        return None
    complete, stages = _complete(settings, section, program), settings.lines.get("stages")
    if program.facts.config.get("is_encoder_decoder"):
        origin = stages.origin if stages else section.name_origin
        _uncut(f"{program.facts.name} is an encoder with a decoder", origin, program.sink)
        return None
    schedule = settings.values.get("schedule", "1f1b")
    usual = (TERMS[schedule].each or 2) if isinstance(schedule, str) else 1
    cut = None
    if isinstance(stages, ast.Setting):
        cut = _stages(stages.value, ranks, usual, program.scope)
    if cut is None or not complete:
        return None
    return _cut(axis, cut, settings, section, program)


def _cut(
    axis: str, cut: BlockCut, settings: Settings, section: ast.Section, program: Program
) -> PipelineRule | None:
    """The pipeline whose stages are known, or None after a finding."""
    blocks, bounds, times = cut
    order = block_order(program.facts, str(blocks))
    rest = _edge_modules(program.facts, blocks, order)
    if order.problem or isinstance(rest, str):
        reason, origin = order.problem or rest, settings.lines["stages"].origin
        _uncut(str(reason), origin, program.sink, f"between the blocks of `{blocks}`")
        return None
    schedule, rows = _schedule(axis, len(bounds) - 1, settings, program)
    if not schedule:
        return None
    op = Pipeline(
        axis=axis,
        own=(0,),
        blocks=blocks,
        bounds=bounds,
        schedule=schedule,
        microbatches=settings.values["microbatches"],
        inputs=rest[0],
        outputs=rest[1],
        returned=order.returned,
        copies=_copies(program.facts, blocks, order, len(bounds) - 1),
        given=order.given,
        states=order.states,
        rank_passes=rows,
        timed=(times.rows, times.seq) if times else (),
        origin=section.name_origin,
        origins=tuple((name, line.origin) for name, line in settings.lines.items()),
    )
    op = cut_at(op, bounds, program.facts)
    bare = (m for m in program.facts.model.below() if not m.module.parameters)
    before = tuple(m for m in bare if {generic(n) for n in m.names()} <= order.before)
    return PipelineRule(op=op, times=times, before=before, origin=section.name_origin)


def _uncut(reason: str, origin: Span, sink: Sink, where: str = "into stages") -> None:
    message = f"the model cannot be cut {where}: {reason}"
    sink.error("PL566", message, origin, help="without a pipeline, set its axis to 1")


def _schedule(
    axis: str, stages: int, settings: Settings, program: Program
) -> tuple[str, tuple[str, ...]]:
    """The schedule and, from a file, the passes of each rank; an empty name after a finding."""
    value = settings.values.get("schedule", "1f1b")
    if not isinstance(value, ast.Call):
        return value, ()
    text = program.schedule_files.get(value.origin)
    assert program.mesh is not None
    ranks, microbatches = program.mesh.size(axis), settings.values["microbatches"]
    try:
        if text is None:
            raise ScheduleFileError('no file was read: write `schedule = file("schedule.csv")`')
        # what cannot be read is PL006 already
        terms = {"ranks": ranks, "stages": stages, "microbatches": microbatches}
        return read_schedule(text, **terms) if text else ("", ())
    except ScheduleFileError as error:
        shape = f"{stages} stages on {ranks} ranks, {microbatches} microbatches"
        message = f"this schedule cannot be run: {error}"
        hint = "each stage runs forward and backward once for each microbatch"
        program.sink.error(
            "PL568", message, value.origin, facts=[f"the plan has {shape}"], help=hint
        )
        return "", ()


def _axis(section: ast.Section, program: Program) -> str | None:
    names = [axis.path for axis in (*section.axes, *section.replicate)]
    mesh_axis = program.mesh.axis(names[0]) if program.mesh and len(names) == 1 else None
    if mesh_axis is not None and mesh_axis.role is AxisRole.STAGE:
        return mesh_axis.name
    if mesh_axis is not None or len(names) != 1:
        message = "a pipeline section works over the axis of the stages"
        program.sink.error("PL305", message, section.name_origin, help="write `pipeline on pp {`")
    return None


def _value(item: ast.Setting, program: Program) -> object:
    if item.name == "stages":
        return True
    if item.name == "schedule" and isinstance(item.value, ast.Call) and item.value.name == "file":
        return item.value
    if item.name == "microbatches":
        value = word(item.value, program.scope)
        if is_integer(value) and value > 0:
            return value
        hint = "write `microbatches = 8`"
        wrong_value(item.value, item.name, "a positive number", value, program.scope, hint=hint)
        return None
    return one_word(item, {name: name for name in SCHEDULES}, program.scope)


def _complete(settings: Settings, section: ast.Section, program: Program) -> bool:
    for name, hint in (("microbatches", "write `microbatches = 8`"), ("stages", _EXAMPLE)):
        if name not in settings.lines:
            other = (i.name for i in section.items if isinstance(i, ast.Setting))
            if any(name in nearest(o, _SETTINGS) for o in other if o not in _SETTINGS):
                return False  # misspelled, which is a finding already
            message = f"the pipeline has no `{name}`"
            program.sink.error("PL012", message, section.name_origin, help=hint)
            return False
    return all(value is not None for value in settings.values.values())


# Stages ------------------------------------------------------------------------------------------


def _stages(value: ast.Expr, ranks: int, each: int, scope: Scope) -> BlockCut | None:
    """The list of blocks and the first block of each stage, or None after a finding; `each` is the
    number of stages of a rank where nothing is said.
    """
    if isinstance(value, ast.List):
        return _read_list(value, scope)
    if isinstance(value, ast.Call) and value.name in _WAYS:
        return _read_cut(value, ranks, each, scope)
    if isinstance(value, ast.Call):
        unknown(value, tuple(_WAYS), "way to make stages", scope)
    else:
        message = "`stages` is `even(...)`, `balanced(...)`, `weighted(...)` or a list of selectors"
        scope.sink.error("PL012", message, value.origin, help=_EXAMPLE)
    return None


def _read_cut(call: ast.Call, ranks: int, each: int, scope: Scope) -> BlockCut | None:
    """`even(SELECTOR, each = 1, by = work)`, `balanced(SELECTOR, seq = 4096)` or
    `weighted(SELECTOR, blocks = [3, 5])`.
    """
    given_sizes, timed, known = call.name == "weighted", call.name == "balanced", _WAYS[call.name]
    arguments = Arguments(call, scope, known)
    numbers = {"each": each, "first": 0, "last": 0}
    numbers |= {n: arguments.integer(n, d) for n, d in numbers.items() if n in known}
    by_work = timed
    if "by" in known:
        by_work = arguments.word("by", {"blocks": False, "work": True}, False)
    times = _times(arguments) if timed else None
    more = next((a for a in call.arguments if a.name in ("first", "last")), None)
    if more is not None and by_work and not timed:
        hint = "`by = work` counts what the first and the last stage have besides blocks"
        arguments.wrong(more, f"`{more.name}` has no effect beside `by = work`", hint)
    given = arguments.take("blocks") if given_sizes else None
    selector = arguments.positional[0].value if arguments.positional else None
    if not arguments.done(positional=1):
        return None
    selected = _list_of(_select(selector, scope), call, scope)
    if selected is None:
        return None
    blocks, indices = selected
    count = length(blocks)
    if len(indices) < count:
        _report(scope, call, [*indices], blocks)
        return None
    stages = ranks * max(1, numbers["each"])
    if by_work:
        sizes = balance_stages(*_work(blocks, scope.facts), stages)
    elif not given_sizes:
        sizes = even(count, stages, numbers["first"], numbers["last"])
    else:
        listed = evaluate(given, scope) if given is not None else ()
        sizes = [n for n in listed if isinstance(n, int)] if isinstance(listed, tuple) else []
    if not _right(sizes, blocks, len(sizes) or ranks * numbers["each"], call, scope):
        return None
    return BlockCut(blocks, (0, *accumulate(sizes)), times)


def _right(
    sizes: Sequence[int], blocks: Modules, stages: int, call: ast.Call, scope: Scope
) -> bool:
    """Whether stages of these sizes hold all blocks, each at least one; reports PL560, PL563."""
    count = length(blocks)
    if not sizes or min(sizes) < 1:
        message = f"{count} blocks are too few for {stages} stages of these sizes"
        shown = ", ".join(map(str, sizes))
        facts = [f"blocks of each stage: {shown}"] if sizes else []
        hint = "every stage holds at least one block: use fewer stages"
        scope.sink.error("PL563", message, call.origin, facts=facts, help=hint)
        return False
    if sum(sizes) != count:
        message = f"the stages hold {sum(sizes)} blocks, and `{blocks}` has {count}"
        scope.sink.error("PL560", message, call.origin, help=f"the sizes add up to {count}")
        return False
    return True


def _times(arguments: Arguments) -> EqualTimes:
    """The size of the microbatch by whose time stages are cut; reports numbers below 1."""
    rows, seq = arguments.integer("rows", 1), arguments.integer("seq", 4096)
    if min(rows, seq) < 1:
        hint = "write `balanced(model.layers.*, rows = 1, seq = 4096)`"
        arguments.wrong(arguments.call, "`rows` and `seq` are 1 or more", hint)
    return EqualTimes(rows=rows, seq=seq, origin=arguments.call.origin)


def _read_list(value: ast.List, scope: Scope) -> BlockCut | None:
    """A list of selectors, one for each stage."""
    blocks: Modules | None = None
    order: list[int] = []
    bounds = [0]
    for item in value.items:
        listed = _list_of(_select(item, scope), item, scope)
        if listed is None:
            return None
        if blocks is not None and blocks != listed[0]:
            message = f"stages are cut from `{blocks}` and from `{listed[0]}`"
            scope.sink.error("PL560", message, item.origin, help="the blocks of one list are cut")
            return None
        blocks = listed[0]
        order += listed[1]
        bounds.append(len(order))
    if blocks is None or order != [*range(length(blocks))]:
        _report(scope, value, order, blocks)
        return None
    return BlockCut(blocks, tuple(bounds))


def _report(scope: Scope, node: ast.Node, order: list[int], blocks: Modules | None) -> None:
    """PL560, with the blocks that are in no stage, in two, or out of order."""
    entries = range(length(blocks)) if blocks else range(0)
    lost = [i for i in entries if i not in order]
    twice = [i for i in entries if order.count(i) > 1]
    message = "the blocks of the stages are not in the order of the model"
    if twice:
        message = f"`{blocks}{Indices.from_numbers(twice)}` is in two stages"
    if lost:
        message = f"`{blocks}{Indices.from_numbers(lost)}` is in no stage"
    help = "every block is in exactly one stage, in the order in which the model runs them"
    scope.sink.error("PL560", message, node.origin, help=help)


def _select(value: ast.Expr | None, scope: Scope) -> tuple[Modules, ...]:
    selector = value if isinstance(value, ast.Selector) else None
    return select(selector, (scope.facts.model,), scope) if selector else ()


def _list_of(
    selected: tuple[Modules, ...], node: ast.Node, scope: Scope
) -> tuple[Modules, list[int]] | None:
    """The list that holds all of these blocks, and their indices in order."""
    lists = dict.fromkeys(m.path[:-1] for m in selected)
    plain = [p for p in lists if all(isinstance(part, str) for part in p)]
    if not selected or len(lists) != 1 or not plain or isinstance(selected[0].path[-1], str):
        if not scope.sink.errors or selected:
            message = "a stage consists of entries of one list of blocks"
            scope.sink.error("PL560", message, node.origin, help=_EXAMPLE)
        return None
    at = scope.facts.module_at(".".join(map(str, plain[0])))
    chosen = Indices(0)
    for modules in selected:
        last = modules.path[-1]
        assert isinstance(last, Indices)
        chosen |= last
    return at, [*chosen]


def _work(blocks: Modules, facts: Facts) -> tuple[list[int], int, int]:
    """The work of each block, and of what the first and the last stage have besides blocks."""
    each = [0] * length(blocks)
    for child in blocks.module.children:
        block_work = work(child.module, facts.config)
        for i in child.indices or ():
            each[i] = block_work
    around = _edge_modules(facts, blocks, block_order(facts, str(blocks)))
    ends = ((), ()) if isinstance(around, str) else around  # which is a finding elsewhere
    alone = ([(len(m), replace(m.module, children=())) for m in end] for end in ends)
    first, last = (sum(n * work(m, facts.config) for n, m in end) for end in alone)
    return each, first, last


# What is around the blocks -----------------------------------------------------------------------


def _edge_modules(
    facts: Facts, blocks: Modules, order: BlockOrder
) -> tuple[tuple[Modules, ...], tuple[Modules, ...]] | str:
    """The first and the last stage's modules besides blocks, or why a module is in neither."""
    inputs: list[Modules] = []
    outputs: list[Modules] = []
    for modules in facts.model.below():
        if not modules.module.parameters or modules.path[: len(blocks.path)] == blocks.path:
            continue
        names = {generic(name) for name in modules.names()}
        if names <= {*order.after}:
            outputs.append(modules)
        elif modules in _on_all_stages(facts, blocks, order):
            continue
        elif names & {*order.apart}:
            return f"`{modules}` runs before the last block and after the first one"
        else:  # what does not run, such as a tower without images, needs one place too
            inputs.append(modules)
    return tuple(inputs), tuple(outputs)


def _on_all_stages(facts: Facts, blocks: Modules, order: BlockOrder) -> list[Modules]:
    """The modules with parameters that each stage runs itself: those around the blocks, and those
    that compute arguments of blocks from positions alone.
    """
    return [
        modules
        for modules in facts.model.below()
        if modules.module.parameters
        and (
            blocks.path[: len(modules.path)] == modules.path
            or {generic(name) for name in modules.names()} <= order.again
        )
    ]


def _copies(facts: Facts, blocks: Modules, order: BlockOrder, stages: int) -> tuple[Copies, ...]:
    """Their parameters."""
    names = [
        f"{name}.{parameter.name}".removeprefix(".")
        for modules in _on_all_stages(facts, blocks, order)
        for name in modules.names()
        for parameter in modules.module.parameters
    ]
    return (Copies(stages=tuple(range(stages)), parameters=tuple(names)),) if names else ()
