"""The family of the model that a peer's file names, and the plan to extend."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planc.diagnostics.diagnostic import Sink
from planc.elaborate.settings import SETTINGS, uses
from planc.files.project import ProjectError
from planc.files.resources import PLANS
from planc.model.config import CLASS, locate_config, read, shipped_models
from planc.model.facts import Modules
from planc.syntax import ast, plan_files
from planc.tools.importers.peer import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The plan that an imported one extends, and the model that it is for.

    Args:
        family: a `model_type`, or None where the file does not tell.
        model: a name that `planc check` takes, or None.
        plan: the name of the plan for `extend`: the family's, else the base of all families.
        known: whether it is the family's.
        options: the settings and options of that plan and their defaults.
        axes: the axes of its mesh.
        sections: the names of its sections.
        units: what its FSDP units are, as written: `$blocks`.
        names: the names of modules in its selectors.
    """

    family: str | None = None
    model: str | None = None
    plan: str
    known: bool
    options: dict[str, object]
    axes: frozenset[str]
    sections: frozenset[str]
    units: frozenset[str]
    names: frozenset[str]

    def own_rules(self) -> Mapping[str, str]:
        """The `tp_plan` that transformers ships for the family; empty if there is none."""
        from planc.model.sources.huggingface import defaults

        return defaults(self.family or "")[0]

    def lacking(self, keys: Iterable[str]) -> frozenset[str]:
        """The modules of transformers' own plan that are none of the model, whose family has
        them.
        """
        from planc.model.load import load, load_values
        from planc.model.sources.huggingface import defaults

        name, sink = self.family or "", Sink()
        shipped_rules, values = defaults(name)
        if not (known := [key for key in keys if key in shipped_rules]):
            return frozenset()
        facts = load(self.model, sink) if self.model else load_values(values, name, sink)
        if facts is None:
            return frozenset()
        paths = [_generic_path(modules) for modules in facts.model.below()]

        def there(key: str) -> bool:
            pattern = re.compile(rf"(.+\.)?{re.escape(key)}".replace(r"\*", r"[^.]+"))
            return any(map(pattern.fullmatch, paths))

        return frozenset(key for key in known if not there(key))


def _generic_path(modules: Modules) -> str:
    """The path of modules, each set of indices as one segment."""
    return ".".join(s if isinstance(s, str) else "[]" for s in modules.path)


def base_of(family: str | None, model: str | None, sink: Sink) -> Base:
    """The plan of a family, read; the base of all families if there is none."""
    try:
        place = plan_files.plan_of_family(family) if family else None
    except ProjectError:  # several of one's own
        place = plan_files.plan_of_family(family or "", user_folders=False)
    path = place.path if place and place.path else PLANS / "blocks.plan"
    files = plan_files.read(str(path), sink)
    nodes = [node for file in files for node in ast.walk(file)]
    sections = [node for node in nodes if isinstance(node, ast.Section)]
    used = (setting for setting in SETTINGS.values() if not setting.axis)
    options: dict[str, object] = {s.word: s.default for s in used if uses(s, files)}
    for node in nodes:
        if isinstance(node, ast.Option) and isinstance(node.value, ast.Literal):
            options[node.name] = node.value.value
    meshes = (item for section in sections if section.name == "mesh" for item in section.items)
    targets = (rule.target for s in sections if s.name == "fsdp" for rule in ast.walk(s)
               if isinstance(rule, ast.Rule))  # fmt: skip
    return Base(
        family=family,
        model=model,
        plan=place.name if place and path.parent != PLANS else path.stem,
        known=place is not None,
        options=options,
        axes=frozenset(item.name for item in meshes if isinstance(item, ast.Setting)),
        sections=frozenset(section.name for section in sections),
        units=frozenset(t.path for t in targets if isinstance(t, ast.Selector)),
        names=frozenset(
            word
            for node in nodes
            if isinstance(node, ast.Selector)
            for word in re.findall(r"\w+", node.path)
        ),
    )


def family_of(
    named: str | None, flavor: str | None, block_class: str | None
) -> tuple[str | None, str | None]:
    """(family, a model that planc can name), as far as the file tells."""
    models = table("models")
    named = models["flavors"].get(f"{_plain(named or '')} {_plain(flavor or '')}", named)
    words = [w for w in (named, flavor) if w and re.fullmatch(r"[\w./:-]+", w)]
    for word in words:
        if model := _known_name(word):
            return families_named(model, Sink()), model
    known = sorted({f for p in PLANS.glob("*.plan") for f in plan_files.families(p)}, key=len)
    for word in words:
        last = word.rstrip("/").rpartition("/")[2].lower()
        for pattern, family in models["names"]:
            if re.search(pattern, last):
                return family, None
        if families := [f for f in known if _plain(f) in _plain(last)]:
            return families[-1], None
    if block_class:
        owner = _plain(re.sub(r"(Text)?(Decoder|Encoder)?(Layer|Block)$", "", block_class))
        return next((f for f in known if _plain(f) == owner), None), None
    return None, None


def named_by(function: str, flavor: str | None) -> tuple[str, str | None]:
    """(model, flavor) of a function of torchtitan's registries, such as `gpt_oss_20b`."""
    words = function.split("_")
    for at in range(1, len(words) + 1):
        model, rest = "_".join(words[:at]), flavor or "_".join(words[at:])
        if f"{_plain(model)} {_plain(rest)}" in table("models")["flavors"]:
            return model, rest
    return function, flavor


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _known_name(name: str) -> str | None:
    """The name under which planc finds a model: on this machine, or among the shipped shapes."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    bare = re.sub(r"(-(instruct|it|base|hf|chat|bf16|preview))+$", "", last).removeprefix("meta-")
    if bare in shipped_models():
        return bare
    for shape in shipped_models() if bare != last else ():
        if _plain(shape) == _plain(bare):
            return shape
    return name if "/" in name and not name.startswith((".", "/")) and locate_config(name) else None


def families_named(model: str, sink: Sink) -> str | None:
    """The family of a model, or None after PL600 to PL602."""
    place = locate_config(model)
    if place is None:
        sink.error("PL600", f"there is no model {model!r}", help="`planc list models` has names")
        return None
    config = read(place, sink)
    values = config.values if config else {}
    return str(values.get("model_type") or values.get(CLASS) or "") or None
