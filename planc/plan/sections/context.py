"""The context sections -> how the ranks of an axis compute parts of each sequence."""

from collections.abc import Iterator

from planc.model.config import is_diffusers
from planc.model.module_table import puts_images
from planc.ops.context import ContextParallel
from planc.ops.documents import resets
from planc.plan.ir import ContextRule, ImagesSetting
from planc.plan.program import Program
from planc.plan.rule_conflicts import Settings
from planc.plan.sections.word_settings import IMAGES, ROWS, word_settings
from planc.syntax import ast

_SCRIPT, _GATHER = "script", "gather"
WORDS = {
    "attention": {w: w for w in ("all_gather", "ulysses", "ring", _GATHER, _SCRIPT)},
    "balance": {w: w for w in ("head_tail", "none", "per_document")},
    "exchange": {w: w for w in ("state", "gather")},
    "images": IMAGES,
}


def context(program: Program) -> Iterator[ContextRule]:
    """The rules of the context sections; with `attention = script` the training script slices the
    sequences, and its attention exchanges keys and values.
    """
    settings, sections = Settings(program.sink), [*program.named("context")]
    axes = [axis for section in sections for axis in (*section.axes, *section.replicate)]
    for section in sections:
        word_settings(section, WORDS, settings, program, "attention = all_gather")
        if not section.axes or len({axis.path for axis in axes}) > 1:
            message = "a context section works over one axis of the mesh"
            hint = "write `context on cp {`"
            program.sink.error("PL305", message, section.name_origin, help=hint)
            return
    if sections:
        yield from _rule(axes[0].path, sections[0], settings, program)


def _rule(
    axis: str, section: ast.Section, settings: Settings, program: Program
) -> Iterator[ContextRule]:
    values, lines = settings.values, settings.lines
    attention = values.get("attention", "all_gather")
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
        states = () if attention == _GATHER else resets(program.facts)
        # masks of whole rows are as much work for each rank; a ring leaves tiles out
        even = attention == _GATHER or (bool(states) and attention != "ring")
        even |= is_diffusers(program.facts.config)
        balance = "none" if even else "head_tail"
        op = ContextParallel(
            axis=axis,
            attention=attention,
            balance=values.get("balance") or balance,
            exchange=values.get("exchange") or "state",
            states=states,
            holder=next((str(m) for m in puts_images(program.facts)), ""),
            origin=origin,
            origins=tuple((n, lines[n].origin) for n in ("balance", "exchange") if n in lines),
        )
        images = _images(axis, settings)
        rule = ContextRule(axis=axis, op=op, images=images, origin=origin).on(program.facts)
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
