"""A name in torch -> the module or the parameter."""

import contextlib
import re

from planc.diagnostics.diagnostic import Sink, nearest, one_of
from planc.model.facts import Facts, Modules, Parameter

_WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)\.|\.(?:_orig_mod)$")


def look_up(name: str, facts: Facts, sink: Sink) -> tuple[Modules, Parameter | None] | None:
    """The module of a name, and the parameter where it is one's, or None after PL130.

    Names may have those of wrappers, and `layers[3]`; `root` or an empty name is the model itself.
    """
    plain = re.sub(r"\[(\d+)\]", r".\1", _WRAPPERS.sub("", name)).removeprefix(".")
    plain = "" if plain == "root" else plain
    bare = re.sub(r"(\.|^)base_layer(?=\.|$)", "", plain)  # the layer that peft wraps
    missing = plain
    for path in dict.fromkeys((plain, bare)):
        try:
            return facts.module_at(path), None
        except KeyError as error:
            missing = str(error.args[0])
        with contextlib.suppress(KeyError):
            return facts.find(path)
    _unknown(name, missing, facts, sink)
    return None


def _unknown(name: str, missing: str, facts: Facts, sink: Sink) -> None:
    path, _, last = missing.rpartition(".")
    at = facts.module_at(path)
    close = nearest(last, _below(at))
    around = f"`{path}`" if path else "the model"
    help = f"did you mean {one_of(f'`{path}.{c}`'.replace('`.', '`') for c in close)}?"
    if not close:
        ends = [m for m in facts.model.below() if last in _below(m)]
        first = [m.first_name for m in ends[:3]]
        help = f"there is {one_of(f'`{f}.{last}`' for f in first)}" if first else ""
    sink.error(
        "PL130",
        f"there is no module and no parameter `{name}`: {around} has no `{last}`",
        facts=(f"{around} is a {at.module.cls}: {_list_contents(at)}",),
        help=help or None,
    )


def _below(at: Modules) -> list[str]:
    names = [p.name for p in at.module.parameters]
    for child in at.module.children:
        names += [child.name] if child.indices is None else map(str, child.indices)
    return names


def _list_contents(at: Modules) -> str:
    names = [c.name if c.indices is None else f"entries {c.indices}" for c in at.module.children]
    names += [p.name for p in at.module.parameters]
    return ", ".join(names) or "nothing is in it"
