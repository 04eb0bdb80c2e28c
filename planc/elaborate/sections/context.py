"""The context sections -> how the ranks of an axis compute parts of each sequence."""

from collections.abc import Iterator

from planc.diagnostics.diagnostic import one_of
from planc.elaborate.call_arguments import Arguments, unknown
from planc.elaborate.evaluate import is_integer
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import Claims, Placed, Settings
from planc.elaborate.sections.tensor import modules_of
from planc.elaborate.sections.word_settings import IMAGES, ROWS, one_word, read_settings
from planc.ir.nodes import ContextRule, ImagesSetting
from planc.model.config import is_diffusers
from planc.model.facts import Modules
from planc.model.module_table import puts_images
from planc.model.recurrent_states import state_updates
from planc.model.roles import attention as attention_of
from planc.ops.context import Attend, ContextParallel
from planc.syntax import ast

_SCRIPT, _GATHER = "script", "gather"
_SEVERAL = ("all_gather", "ring")
"""Exchanges that a Ulysses all-to-all may precede."""
_ALL = (*_SEVERAL, "ulysses")
"""The exchanges that a layer may choose."""
WORDS = {
    "attention": {w: w for w in ("all_gather", "ulysses", "ring", _GATHER, _SCRIPT)},
    "balance": {w: w for w in ("head_tail", "none", "per_document")},
    "exchange": {w: w for w in ("state", "gather")},
    "images": IMAGES,
}


def context(program: Program) -> tuple[tuple[ContextRule, ...], tuple[Attend, ...]]:
    """The rules of the context sections, and those for layers whose attention exchanges otherwise;
    with `attention = script` the training script slices the sequences, and its attention exchanges
    keys and values.
    """
    settings, sections = Settings(program.sink), [*program.sections_named("context")]
    axes = [axis for section in sections for axis in (*section.axes, *section.replicate)]
    layers: Claims[Attend | None] = Claims(program.sink)
    for section in sections:
        _read(section, settings, layers, program)
        if not section.axes or len({axis.path for axis in axes}) > 1:
            message = "a context section works over one axis of the mesh"
            hint = "write `context on cp {`"
            program.sink.error("PL305", message, section.name_origin, help=hint)
            return (), ()
    found = tuple(_rule(axes[0].path, sections[0], settings, program)) if sections else ()
    return found, _layers(found, layers, program) if found else ()


def _read(
    section: ast.Section, settings: Settings, layers: Claims[Attend | None], program: Program
) -> None:
    """Adds the lines of a section."""

    def read(item: ast.Setting) -> object:
        call = item.value
        if item.name == "attention" and isinstance(call, ast.Call) and call.name in _SEVERAL:
            return _several(call, program)
        return one_word(item, WORDS[item.name], program.scope)

    def rule(item: ast.Rule, placed: Placed) -> None:
        if item.action.name not in _ALL:
            unknown(item.action, _ALL, "exchange of attention", program.scope)
        elif (way := _several(item.action, program)) is not None:
            axis = section.axes[0].path if section.axes else ""
            op = Attend(
                modules=program.facts.model,
                axis=axis,
                attention=way[0],
                ulysses=way[1],
                origin=item.origin,
            )
            found = _attending(item, placed, program)
            layers.add(found, "attention", op, item.origin, override=item.override)

    example = "attention = all_gather"
    read_settings(section, WORDS, settings, program, example, read=read, rule=rule)


def _attending(rule: ast.Rule, placed: Placed, program: Program) -> tuple[Modules, ...]:
    """The attention modules that a rule is on; PL571 where it is on none."""
    every = attention_of(program.facts)
    found = modules_of(rule, placed, program.scope)
    some = tuple(part for m in found for a in every if (part := a.part_inside(m)) is not None)
    if found and not some:
        message = f"no module in `{found[0]}` is attention by the name of its class"
        program.sink.error("PL571", message, rule.target.origin, help="name attention modules")
    return some


def _several(call: ast.Call, program: Program) -> tuple[str, int] | None:
    """The call's name and number, such as 2 for `ring(ulysses = 2)`, or None after a finding."""
    arguments = Arguments(call, program.scope, ("ulysses",) if call.name in _SEVERAL else ())
    number = arguments.read("ulysses", 1, "a positive integer", lambda v: is_integer(v) and v > 0)
    return (call.name, number) if arguments.done() else None


def _layers(
    rules: tuple[ContextRule, ...], layers: Claims[Attend | None], program: Program
) -> tuple[Attend, ...]:
    """The layers that exchange otherwise than the rest, which calls the attention interface."""
    found, op = layers.rules(), rules[0].op
    for layer in found:
        if op is None or op.attention == _GATHER or op.patches:
            message = "layers choose what attention exchanges where planc exchanges keys and values"
            help = f"write `attention` as one of {one_of((f'`{w}`' for w in _ALL), last='or')}"
            program.sink.error("PL012", message, layer.origin, help=help)
    return found


def _rule(
    axis: str, section: ast.Section, settings: Settings, program: Program
) -> Iterator[ContextRule]:
    values, lines = settings.values, settings.lines
    said = values.get("attention", "all_gather")
    attention, ulysses = said if isinstance(said, tuple) else (said, 1)
    origin = lines["attention"].origin if "attention" in lines else section.name_origin
    if attention == _SCRIPT:
        if "balance" in lines:
            message = "`balance` says which tokens planc gives a rank; here the script slices"
            program.sink.error("PL012", message, lines["balance"].origin, help="remove it")
        if values.get("images") == ROWS:
            message = "planc divides images where it cuts rows; here the script slices"
            program.sink.error("PL012", message, lines["images"].origin, help="remove it")
        yield ContextRule(axis=axis, op=None, origin=origin)
    elif attention is not None:
        states = () if attention == _GATHER else state_updates(program.facts)
        # masks of whole rows are as much work for each rank; a ring leaves tiles out
        even = attention == _GATHER or (bool(states) and attention != "ring")
        even |= is_diffusers(program.facts.config)
        balance = "none" if even else "head_tail"
        op = ContextParallel(
            axis=axis,
            attention=attention,
            ulysses=ulysses,
            balance=values.get("balance") or balance,
            exchange=values.get("exchange") or "state",
            states=states,
            holder=next((str(m) for m in puts_images(program.facts)), ""),
            origin=origin,
            origins=tuple((n, lines[n].origin) for n in ("balance", "exchange") if n in lines),
        )
        images = _images(axis, settings)
        rule = ContextRule(axis=axis, op=op, images=images, origin=origin).for_model(program.facts)
        if attention == _GATHER and rule.op and not rule.op.seeing:
            program.sink.error(
                "PL571",
                f"no module in the blocks of {program.facts.name} is attention by the name of its "
                "class, so there is nothing that would gather the tokens of all ranks",
                origin,
                help="remove `attention = gather`, or set `cp = 1`",
            )
        yield rule


def _images(axis: str, settings: Settings) -> ImagesSetting | None:
    """The setting `images`: ranks of a context axis have parts of the gradient of features."""
    if "images" not in settings.lines:
        return None
    divided, line = settings.values["images"] == ROWS, settings.lines["images"].origin
    return ImagesSetting(axis=axis, divided=divided, parts=True, origin=line)
