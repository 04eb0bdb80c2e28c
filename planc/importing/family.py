"""The family of the model that a peer's file names, and the plan to extend."""

import re
from dataclasses import dataclass

from planc.diagnostic import Sink
from planc.importing.peer import table
from planc.model.config import CLASS, locate_config, read, shipped_models
from planc.model.facts import Modules
from planc.project import ProjectError
from planc.resources import PLANS
from planc.syntax import ast, plan_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a plan builds on.

    Args:
        family: a `model_type`, or None where the file does not tell.
        model: a name that `planc check` takes, or None.
        plan: the name of the plan for `extend`, or None where the library has none.
        options: the options of that plan and their defaults.
        axes: the axes of its mesh.
        text: its text with those that it extends, for rules that can be overridden.
    """

    family: str | None = None
    model: str | None = None
    plan: str | None = None
    options: dict[str, object]
    axes: frozenset[str] = frozenset()
    text: str = ""

    def has(self, rule: str) -> bool:
        """Whether the plan has a rule or a header with this text."""
        return rule in re.sub(r" +", " ", self.text)

    @property
    def over_cp(self) -> bool:
        """Whether units are sharded over `cp` too, by the section that overrides others."""
        return self._holds(r"fsdp on (\w+)") == "dp_shard_cp"

    @property
    def root(self) -> str:
        """The module that holds the list of blocks, to which paths of a `tp_plan` are relative."""
        return self._holds(r"let block *= *([\w.]+)\.\w+\.\*") or "model"

    def lacks(self, path: str) -> bool:
        """Whether a module of transformers' own plan is none of the model, whose family has it."""
        from planc.model.load import load, load_values
        from planc.model.sources.huggingface import defaults

        own, values = defaults(self.family or "")
        if not any(path in (key, f"{self.root}.{key}") for key in own):
            return False
        sink = Sink()
        name = self.family or ""
        facts = load(self.model, sink) if self.model else load_values(values, name, sink)
        pattern = re.compile(re.escape(path).replace(r"\*", r"[^.]+"))
        found = facts and any(pattern.fullmatch(_dotted(m)) for m in facts.model.below())
        return facts is not None and not found

    def _holds(self, statement: str) -> str | None:
        """What a statement says that others of its kind may override."""
        found = re.findall(rf"(?m)^(override )?{statement}", self.text)
        return max(found, key=lambda each: bool(each[0]))[1] if found else None


def _dotted(modules: Modules) -> str:
    """The path of modules, each set of indices as one segment."""
    return ".".join(s if isinstance(s, str) else "[]" for s in modules.path)


def base_of(family: str | None, model: str | None, sink: Sink) -> Base:
    """The plan of a family, read; a base without a plan if there is none."""
    try:
        place = plan_files.plan_of_family(family) if family else None
    except ProjectError:  # several of one's own
        place = plan_files.plan_of_family(family or "", own=False)
    if place is None or place.path is None:
        return Base(family=family, model=model, options={})
    files = plan_files.read(str(place.path), sink)
    options: dict[str, object] = {}
    axes: set[str] = set()
    for file in files:
        for statement in file.statements:
            if isinstance(statement, ast.Option) and isinstance(statement.value, ast.Literal):
                options[statement.name] = statement.value.value
            if isinstance(statement, ast.Section) and statement.name == "mesh":
                axes |= {i.name for i in statement.items if isinstance(i, ast.Setting)}
    name = place.path.stem if place.path.parent == PLANS else place.name
    return Base(
        family=family,
        model=model,
        plan=name,
        options=options,
        axes=frozenset(axes),
        text="\n".join(file.origin.source.text for file in files),
    )


def family_of(
    named: str | None, flavor: str | None, block_class: str | None
) -> tuple[str | None, str | None]:
    """(family, a model that planc can name), as far as the file tells."""
    models = table("models")
    named = models["flavors"].get(f"{_plain(named or '')} {_plain(flavor or '')}", named)
    words = [w for w in (named, flavor) if w and re.fullmatch(r"[\w./:-]+", w)]
    for word in words:
        if model := _known(word):
            return families_named(model, Sink()), model
    known = sorted({f for p in PLANS.glob("*.plan") for f in plan_files.families(p)}, key=len)
    for word in words:
        last = word.rstrip("/").rpartition("/")[2].lower()
        for pattern, family in models["names"]:
            if re.search(pattern, last):
                return family, None
        if found := [f for f in known if _plain(f) in _plain(last)]:
            return found[-1], None
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


def _known(name: str) -> str | None:
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
