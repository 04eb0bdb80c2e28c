"""Model facts: everything that planc knows about a model, as plain data.

The module table is a tree. Identical entries of a list (an nn.ModuleList, an nn.Sequential, or an
nn.ModuleDict with the keys "0", "1", ...) are one child with a set of indices, so a 126-layer model
has as many nodes as a 2-layer one. `Modules` names a set of identical modules in that tree; rules,
units and diffs are decided with its overlap and difference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from planc.model.indices import Indices

DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


MODULE_DICT = "ModuleDict"
"""The class of a list whose entries have texts for keys: "0", "1", ..., as in torchtitan."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of one module, by its name in it, with its global shape and its torch dtype.

    Args:
        keep_in_fp32: when a cast of the model leaves it in float32: `float16`, only under a cast to
            that dtype; `half`, under float16 and bfloat16; empty, never.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    keep_in_fp32: str = ""

    def cast(self, dtype: str) -> str:
        """The dtype of the parameter after the model is cast to `dtype`.

        Source: `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict` of transformers.
        """
        if "float" not in self.dtype:
            return self.dtype
        whole = {"float16": ("float16", "half"), "bfloat16": ("half",)}.get(dtype, ())
        return "float32" if self.keep_in_fp32 in whole else dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Module:
    """A module and its descendants.

    Args:
        kind: `linear`, `embedding`, `conv1d`, `norm`, `list`, `dict`, `dropout` (with a rate above
            0) or `other`, which decides the styles that it can take.
        facts: integer attributes that matter when it is split, such as `head_dim`.
        children: in order; identical entries of a list are one child.
    """

    cls: str
    kind: str
    parameters: tuple[Parameter, ...] = ()
    facts: tuple[tuple[str, int], ...] = ()
    children: tuple[Child, ...] = ()

    @cached_property
    def count(self) -> int:
        """The number of elements in the parameters of the module and its descendants."""
        elements = sum(p.numel for p in self.parameters)
        return elements + sum(c.module.count * c.times for c in self.children)

    @property
    def container(self) -> bool:
        """Whether it is an nn.ModuleList or ModuleDict, which have no forward."""
        listed = self.kind == "list" and self.cls in ("ModuleList", MODULE_DICT)
        return self.kind == "dict" or listed

    def parameter(self, name: str) -> Parameter | None:
        """Its own parameter of a name, if it has one."""
        return next((p for p in self.parameters if p.name == name), None)

    @property
    def weight(self) -> Parameter:
        """The `weight` of a linear layer or an embedding."""
        return next(p for p in self.parameters if p.name == "weight")

    def fact(self, name: str) -> int | None:
        return dict(self.facts).get(name)


@dataclass(frozen=True)
class Child:
    """A named child, or the identical entries of a list (`name` is then empty)."""

    module: Module
    name: str = ""
    indices: Indices | None = None

    @property
    def times(self) -> int:
        return 1 if self.indices is None else len(self.indices)

    @property
    def segment(self) -> Segment:
        return self.name if self.indices is None else self.indices


Segment = str | Indices


@dataclass(frozen=True)
class Modules:
    """A set of identical modules: a path in which an entry of a list is a set of indices.

    `model.layers[0:32].mlp` is 32 modules. Two sets with the same `key` differ only in their
    indices. Equality compares paths; `module` is the structure that all modules of the set
    share.
    """

    path: tuple[Segment, ...]
    module: Module = field(compare=False, repr=False)

    @cached_property
    def key(self) -> tuple[str, ...]:
        """The path with every set of indices blanked."""
        return tuple(s if isinstance(s, str) else "[]" for s in self.path)

    @property
    def list_at(self) -> int | None:
        """The index in the path of the entries of the outermost list; None without a list."""
        return next((i for i, s in enumerate(self.path) if isinstance(s, Indices)), None)

    @property
    def entries(self) -> Indices:
        """The entries of the outermost list; empty without a list."""
        return next((s for s in self.path if isinstance(s, Indices)), Indices(0))

    def with_entries(self, entries: Indices) -> Modules:
        """These modules in other entries of the outermost list."""
        at = self.list_at
        assert at is not None
        return Modules((*self.path[:at], entries, *self.path[at + 1 :]), self.module)

    def join(self, other: Modules) -> Modules:
        """The modules of two sets that differ in the entries of the outermost list alone."""
        return self.with_entries(self.entries | other.entries) if self.entries else self

    def __len__(self) -> int:
        return prod(len(s) for s in self.path if isinstance(s, Indices))

    def __str__(self) -> str:
        parts = (f".{s}" if isinstance(s, str) else str(s) for s in self.path)
        return "".join(parts).removeprefix(".") or "root"

    @property
    def first_name(self) -> str:
        """The first of `names`."""
        return ".".join(s if isinstance(s, str) else str(s.first) for s in self.path)

    def names(self) -> Iterator[str]:
        """Yields the torch names (`model.layers.0.mlp`) of all modules of the set, in order."""
        options = ([s] if isinstance(s, str) else map(str, s) for s in self.path)
        return map(".".join, product(*options))

    def overlap(self, other: Modules) -> Modules | None:
        """The modules that are in both sets, or None."""
        return self.part_inside(other) if len(self.path) == len(other.path) else None

    def minus(self, other: Modules) -> tuple[Modules, ...]:
        """The modules of this set that are not in the other one, as disjoint sets."""
        if self.path == other.path:
            return ()
        if self.overlap(other) is None:
            return (self,)
        rest: list[Modules] = []
        inside = list(self.path)
        for i, (mine, theirs) in enumerate(zip(self.path, other.path, strict=True)):
            if not (isinstance(mine, Indices) and isinstance(theirs, Indices)):
                continue
            outside = mine - theirs
            if outside:
                rest.append(Modules((*inside[:i], outside, *inside[i + 1 :]), self.module))
            inside[i] = mine & theirs
        return tuple(rest)

    def union(self, other: Modules) -> Modules | None:
        """Both sets as one if they differ in at most one set of indices; else None."""
        if self.key != other.key:
            return None
        path: list[Segment] = []
        differing = 0
        for mine, theirs in zip(self.path, other.path, strict=True):
            if isinstance(mine, Indices) and isinstance(theirs, Indices) and mine != theirs:
                differing += 1
                path.append(mine | theirs)
            else:
                path.append(mine)
        return Modules(tuple(path), self.module) if differing <= 1 else None

    def is_within(self, other: Modules) -> bool:
        """Whether some module of this set is a module of the other set or a descendant of one."""
        return self.part_inside(other) is not None

    def deeper(self, other: Modules) -> bool:
        """Whether some module of this set is a descendant of a module of the other set."""
        return len(self.path) > len(other.path) and self.is_within(other)

    def part_inside(self, other: Modules) -> Modules | None:
        """The modules of this set that are modules of the other set or descendants of them."""
        path = self.path
        if len(path) < len(other.path):
            return None
        for i in reversed(range(len(other.path))):  # most names differ at the end
            mine, theirs = path[i], other.path[i]
            if mine == theirs:
                continue
            both = not isinstance(mine, str) and not isinstance(theirs, str) and mine & theirs
            if not both:
                return None
            path = (*path[:i], both, *path[i + 1 :])
        return self if path is self.path else Modules(path, self.module)

    def parts_outside(self, others: Iterable[Modules]) -> tuple[Modules, ...]:
        """The modules of this set that are inside none of the others, as disjoint sets."""
        left: tuple[Modules, ...] = (self,)
        for other in others:
            cut = [(part, part.part_inside(other)) for part in left]
            left = tuple(
                rest
                for part, both in cut
                for rest in ((part,) if both is None else part.minus(both))
            )
        return left

    def subtract(self, others: Iterable[Modules]) -> tuple[Modules, ...]:
        """The modules of this set that are in none of the others, as disjoint sets."""
        left: tuple[Modules, ...] = (self,)
        for other in others:
            left = tuple(rest for part in left for rest in part.minus(other))
        return left

    def has(self, name: str) -> bool:
        """Whether the module with the torch name `name` is in this set."""
        parts = name.split(".") if name else []
        return len(parts) == len(self.path) and all(
            part == mine if isinstance(mine, str) else _entry(part, mine)
            for part, mine in zip(parts, self.path, strict=True)
        )

    @property
    def children(self) -> tuple[Modules, ...]:
        """The children of these modules, in order; all entries of a list that are alike as one."""
        inner = self.module.children
        return tuple(Modules((*self.path, child.segment), child.module) for child in inner)

    def entries_in(self, wanted: Indices) -> Iterator[Modules]:
        """Yields the entries of these lists that have one of some indices."""
        for child in self.module.children:
            if child.indices is not None and child.indices & wanted:
                yield Modules((*self.path, child.indices & wanted), child.module)

    def below(self) -> Iterator[Modules]:
        """Yields these modules and all their descendants, parents first."""
        return iter(self._below)

    @cached_property
    def _below(self) -> tuple[Modules, ...]:
        sets, waiting = list[Modules](), [self]
        while waiting:
            sets.append(at := waiting.pop())
            waiting += reversed(at.children)
        return tuple(sets)


def merge_sets(sets: Iterable[Modules], *, alike: bool = False) -> list[Modules]:
    """The sets, merged where one set of indices differs; if `alike`, only of equal structure."""
    merged: list[Modules] = []
    for modules in sets:
        for i, other in enumerate(merged):
            union = None if alike and other.module != modules.module else other.union(modules)
            if union is not None:
                merged[i] = union
                break
        else:
            merged.append(modules)
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCode:
    """The code of a model that its libraries did not ship, as `own_code` finds it.

    Args:
        code: a digest of the functions; empty where there are none. Equal for models of two sizes.
        values: a digest of the numbers that the modules with such functions hold.
        attention: the name of an attention function of the script's own, else empty.
    """

    code: str = ""
    values: str = ""
    attention: str = ""

    def __bool__(self) -> bool:
        return bool(self.code)

    def __str__(self) -> str:
        return f"{self.code} {self.values}" if self else ""


_REMEMBERED = 256
"""The most entries of `Facts.memo`."""


@dataclass(frozen=True)
class Facts:
    """The model facts that a plan is checked against.

    Args:
        name, family: the class of the model, and `config.model_type` or, without a config, that
            class.
        config: the fields of the file over the defaults of the family; `config_name` is for
            messages, and `stated_fields` are those of the user's file.
        ties: groups of torch names of parameters that are one tensor.
        code: `package.module:factory`, or the absolute path of a model's folder, that the user
            allowed planc to run.
        user_model: the nn.Module itself, where a script passed it and planc cannot build it
            otherwise.
        own_code: the functions that will run and that no library shipped.
        inputs_and_loss: what the script says of its inputs and its loss.
        built: whether a script built the model, so that its dtypes are those that train; otherwise
            they are what the configuration says of the stored weights.
        memo: what this process found of the model and of plans for it.
    """

    name: str
    family: str
    config: Mapping[str, Any]
    config_name: str
    root: Module
    ties: tuple[tuple[str, ...], ...] = ()
    stated_fields: frozenset[str] = frozenset()
    code: str = ""
    user_model: Any = field(default=None, compare=False, repr=False)
    own_code: OwnCode = field(default_factory=OwnCode)
    inputs_and_loss: tuple[Any, Any] = field(default=(None, None), compare=False, repr=False)
    built: bool = field(default=False, compare=False)
    memo: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """The facts alone, for another process."""
        return {**self.__dict__, "memo": {}}

    def remember(self, key: Any, value: Any) -> None:
        """Puts something into `memo`; an editor, which reads a plan again and again, fills it."""
        if len(self.memo) >= _REMEMBERED:
            self.memo.clear()
        self.memo[key] = value

    @cached_property
    def model(self) -> Modules:
        """The root module, as a set of one module."""
        return Modules((), self.root)

    @property
    def lacks_config(self) -> bool:
        """Whether no configuration builds it: a user's own module, or what a factory returns."""
        factory = bool(self.code) and not Path(self.code).is_absolute()
        return factory or self.user_model is not None

    @property
    def names(self) -> tuple[str, str]:
        """The names that a plan's header may have: the class, and the family."""
        return self.name, self.family

    @property
    def tied_modules(self) -> set[str]:
        """The torch names of the modules that share a parameter with another."""
        return {name.rpartition(".")[0] for group in self.ties for name in group}

    @property
    def count(self) -> int:
        """The number of elements of all parameters, tied ones once (`root.count` has them
        twice).
        """
        again = sum(self.find(name)[1].numel for group in self.ties for name in group[1:])
        return self.root.count - again

    def find(self, name: str) -> tuple[Modules, Parameter]:
        """The parameter with the torch name `name`, such as `model.layers.0.mlp.up_proj.weight`.

        Returns:
            The one module that holds the parameter, and the parameter.

        Raises:
            KeyError: there is no parameter of that name.
        """
        path, _, last = name.rpartition(".")
        at = self.module_at(path)
        for parameter in at.module.parameters:
            if parameter.name == last:
                return at, parameter
        raise KeyError(name)

    def module_at(self, name: str) -> Modules:
        """The one module with the torch name `name`, such as `model.layers.0`; the root is ``.

        Raises:
            KeyError: there is no such module; the argument is the name up to the missing part.
        """
        at = self.model
        parts = name.split(".") if name else []
        for i, part in enumerate(parts):
            for child in at.module.children:
                indices = child.indices
                if child.name == part if indices is None else _entry(part, indices):
                    segment = part if indices is None else Indices.from_numbers([int(part)])
                    at = Modules((*at.path, segment), child.module)
                    break
            else:
                raise KeyError(".".join(parts[: i + 1]))
        return at

    def parents(self, modules: Modules) -> tuple[Modules, ...]:
        """The parent modules; parents of different structure are separate sets."""
        path = Modules(modules.path[:-1], modules.module)
        overlaps = (at.overlap(path) for at in self.model.below() if at.key == path.key)
        return tuple(both for both in overlaps if both is not None)

    def source(self, field_name: str) -> str:
        """The origin of a configuration value, for messages: the file or the family's defaults."""
        return self.config_name if field_name in self.stated_fields else f"default of {self.family}"


def _entry(part: str, indices: Indices) -> bool:
    """Whether a part of a torch name is one of the indices: `3` can be, `03` cannot."""
    return re.fullmatch("0|[1-9][0-9]{0,8}", part) is not None and int(part) in indices


def below(name: str, holder: str) -> bool:
    """Whether a torch name is inside `holder`, which is empty for the model itself."""
    return name.startswith(f"{holder}.") if holder else bool(name)


def is_inside(name: str, holders: Iterable[str]) -> bool:
    """Whether a torch name is one of `holders`, or inside one of them."""
    return any(name == holder or below(name, holder) for holder in holders)


def generic(name: str) -> str:
    """A torch name with every list index as `*`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def parse_path(text: str) -> tuple[Segment, ...]:
    """The inverse of `str(Modules)`: parses the text into a path.

    Raises:
        ValueError: the text is not such a path.
    """
    if text == "root":
        return ()
    path: list[Segment] = []
    for i, part in enumerate(text.split(".")):
        match = re.fullmatch(r"(\w*)((?:\[[\d:,]+\])*)", part)
        if match is None or not (match[1] or (i == 0 and match[2])):
            raise ValueError(f"not a module path: {text}")
        if match[1]:
            path.append(match[1])
        path.extend(Indices.parse(i) for i in re.findall(r"\[[\d:,]+\]", match[2]))
    return tuple(path)


def most_stored(facts: Facts) -> str:
    """The dtype of most elements."""
    elements = Counter({"float32": 0})
    for at in facts.model.below():
        for parameter in at.module.parameters:
            elements[parameter.dtype] += parameter.numel * len(at)
    return elements.most_common(1)[0][0]
