"""Builds the module table of an nn.Module, and divides its lists.

It reads no tensor data, so the model may be on meta.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature, unwrap
from types import FunctionType
from typing import Any, TypeVar

from planc.model.facts import MODULE_DICT, Child, Facts, Module, Modules, Parameter, Segment
from planc.model.indices import Indices

HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")
"""The names of the features of a head, in several families."""
LATENT_HEAD_SIZES = ("qk_head_dim", "qk_nope_head_dim", "v_head_dim")
"""The names of head sizes in latent attention: of queries, of keys without positions, of values."""
INTEGER_ATTRIBUTES = (
    *HEAD_SIZES,
    *LATENT_HEAD_SIZES,
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_key_value_groups",
    "split_size",
    "heads",
    "n_heads",
    "n_head",
    "num_kv_heads",
    "inner_dim",
    "embed_dim",
    "hidden_size",
    "all_head_size",
    "is_sliding",
)
"""Attributes that determine how a module splits the outputs of its projections. `layer_idx` is not
one of them: layers that differ only in their index are identical."""

SAME = (*HEAD_SIZES, *LATENT_HEAD_SIZES, "num_key_value_groups", "is_sliding")
"""The attributes in this list that are equal on every rank: the size of one head, a ratio, a
flag."""

_LIBRARIES = ("torch", "transformers", "diffusers", "peft")
"""Their modules are split by `INTEGER_ATTRIBUTES` alone."""

_Integers = tuple[tuple[str, int], ...]
T = TypeVar("T")
Path = tuple[Segment, ...]

GROUPED = "grouped_mm"
"""The fact of fused experts that transformers runs as one grouped matrix product."""


FUSED_EXPERTS = "fused_experts"
"""The fact of a module whose parameters are [experts, ...], and whose forward takes hidden states,
the experts of each token, and their weights: the number of experts."""

BATCHED_EXPERTS = "batched_experts"
"""The fact like `FUSED_EXPERTS` of a module whose forward takes the hidden states of all experts in
one tensor."""

TRANSPOSED_EXPERTS = "transposed_experts"
"""The fact of fused experts whose weights are [experts, in, out]."""
PUTS_IMAGES, PUTS_SOUND = "puts_images", "puts_sound"
"""The facts of a module that puts features of images, or of sound and of no images, among the
embeddings of its language model."""
OF_IMAGES = "images: "
"""The prefix of a fact of such a module; the name of a part follows, which computes image features.
Its value is 1, or 2 if other code of the module names the part too."""
LANGUAGE_MODEL = "language_model"
"""The name of that language model in it."""

_BATCHED = ("Llama4TextExperts",)
"""The classes of such a forward, which its signature does not tell."""


def facts_of(
    module: Any,
    *,
    config: Any = None,
    config_name: str = "config.json",
    stated_fields: frozenset[str] = frozenset(),
) -> Facts:
    """The facts of an nn.Module on any device, with a configuration: a mapping, an object with
    `to_dict`, a dataclass or any object with fields; `stated_fields` are those of the user's file.
    """
    values = _mapping(config)
    name = type(module).__name__
    return Facts(
        name=name,
        family=str(values.get("model_type") or name),
        config=values,
        config_name=config_name,
        root=_Table(_fp32_patterns(module), _own_integers(module)).module(module),
        ties=_ties(module),
        stated_fields=stated_fields,
    )


def puts_images(facts: Facts) -> Iterator[Modules]:
    """The module whose code puts features of images among the embeddings of tokens, if there is
    one; of a pipeline on the ranks that have the tower.
    """
    for modules in facts.model.below():
        if modules.module.fact(PUTS_IMAGES):
            beside = (c for c in modules.module.children if c.name != LANGUAGE_MODEL)
            if any(child.module.count for child in beside):
                yield modules


def puts_sound(facts: Facts) -> Iterator[Modules]:
    """The module whose code puts features of sound, and of no images, among the embeddings."""
    yield from (m for m in facts.model.below() if m.module.fact(PUTS_SOUND))


def parts_of_images(holder: Modules) -> dict[str, int]:
    """The modules and parameters of a module that `puts_images` yields that compute features of
    images, by their names in it, with the value of `OF_IMAGES`.
    """
    facts = holder.module.facts
    return {n.removeprefix(OF_IMAGES): value for n, value in facts if n.startswith(OF_IMAGES)}


def towers(facts: Facts) -> Iterator[Modules]:
    """The modules with parameters that compute features of images, and are next to a language
    model that `puts_images` knows.
    """
    for holder in puts_images(facts):
        parts = parts_of_images(holder)
        yield from (m for m in holder.children if m.module.count and m.path[-1] in parts)


def divide_children(
    module: Module, wanted: Sequence[tuple[Path, T]]
) -> Iterator[tuple[Child, list[tuple[Path, T]]]]:
    """The children of a module, each with the values whose paths lead to it or below.

    The entries of a list are divided where paths lead to some of them only.

    Args:
        module: the parent.
        wanted: values, with paths from the parent; those that come out begin at the child.
    """
    for child in module.children:
        if child.indices is None:
            yield child, [(path[1:], value) for path, value in wanted if path[:1] == (child.name,)]
            continue
        parts: list[tuple[Indices, list[tuple[Path, T]]]] = [(child.indices, [])]
        for path, value in wanted:
            if not path or isinstance(path[0], str):
                continue
            cut = []
            for indices, values in parts:
                both, left = indices & path[0], indices - path[0]
                cut += [(both, [*values, (path[1:], value)])] if both else []
                cut += [(left, values)] if left else []
            parts = cut
        yield from (
            (dataclasses.replace(child, indices=indices), values) for indices, values in parts
        )


def already_parallel(module: Any) -> str | None:
    """Why the model counts as parallelized already, or None if it does not."""
    first = {type(child): name for name, child in reversed([*module.named_modules()])}
    for kind, name in first.items():  # few types, many modules
        kinds = {base.__name__ for base in kind.__mro__}
        wrappers = kinds & {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel"}
        if wrappers:
            return f"{name or 'the model'} is sharded ({min(wrappers)})"
        if "CheckpointWrapper" in kinds:
            return f"{name} is wrapped for checkpointing"
    for name, parameter in module.named_parameters():
        if type(parameter).__name__ == "DTensor" or hasattr(parameter, "placements"):
            return f"{name} is a DTensor"
    return None


class _Table:
    """Builds the table. Identical modules become one object, so comparing them is fast."""

    def __init__(
        self, islands: Sequence[tuple[re.Pattern[str], str]], integers: Mapping[int, _Integers]
    ) -> None:
        self._fp32_patterns = islands
        self._integers = integers
        self._known: dict[tuple[Any, ...], Module] = {}
        self._shared: dict[tuple[Any, ...], Parameter] = {}

    def module(self, module: Any, path: str = "") -> Module:
        kind = _kind(module)
        parameters = tuple(
            self._parameter(name, p, self._keep_in_fp32(path, name))
            for name, p in module._parameters.items()
            if p is not None
        )
        children = [
            (n, self.module(c, f"{path}{n}.")) for n, c in module._modules.items() if c is not None
        ]
        numbered = all(n.isdecimal() for n, _ in children)  # an nn.Sequential may name its entries
        listed = kind == "list" and numbered
        facts = (*_facts(module), *self._integers.get(id(module), ()))
        key = (
            type(module),
            kind,
            tuple(id(p) for p in parameters),
            facts,
            tuple((n, id(c)) for n, c in children),
        )
        if key not in self._known:
            alone = (Child(module=m, name=n) for n, m in children)
            self._known[key] = Module(
                cls=type(module).__name__,
                kind=kind,
                parameters=parameters,
                facts=facts,
                children=tuple(_entries(children) if listed else alone),
            )
        return self._known[key]

    def _keep_in_fp32(self, path: str, name: str) -> str:
        """When a cast leaves the parameter in float32: the stronger condition of two patterns."""
        return max((word for p, word in self._fp32_patterns if p.search(path + name)), default="")

    def _parameter(self, name: str, parameter: Any, keep_in_fp32: str) -> Parameter:
        key = (name, parameter.shape, parameter.dtype, parameter.requires_grad, keep_in_fp32)
        if key not in self._shared:
            self._shared[key] = Parameter(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                trainable=parameter.requires_grad,
                keep_in_fp32=keep_in_fp32,
            )
        return self._shared[key]


def _fp32_patterns(module: Any) -> list[tuple[re.Pattern[str], str]]:
    """The patterns of parameter names that `from_pretrained` keeps in float32, and when.

    Source: `build_glob_alternation` in `transformers.core_model_loading`: a star is any text.
    """
    conditions = {"_keep_in_fp32_modules": "float16", "_keep_in_fp32_modules_strict": "half"}
    return [
        (re.compile(name.replace("*", r".*")), word)
        for field, word in conditions.items()
        for name in sorted(getattr(module, field, None) or ())
    ]


def _entries(children: list[tuple[str, Module]]) -> Iterator[Child]:
    groups: dict[int, tuple[Module, int]] = {}
    for name, module in children:
        _, bits = groups.get(id(module), (module, 0))
        groups[id(module)] = (module, bits | 1 << int(name))
    for module, bits in groups.values():
        yield Child(module=module, indices=Indices(bits))


def _own_integers(root: Any) -> dict[int, _Integers]:
    """The integers of modules that no library defines, under any name, by module: a user's code may
    count its heads in any of them. One that differs between the layers of a list, such as their
    index, is left out, so that the layers stay identical.
    """
    alike: dict[str, list[Any]] = {}
    for path, module in root.named_modules():
        if type(module).__module__.partition(".")[0] not in _LIBRARIES:
            alike.setdefault(re.sub(r"\d+", "*", path), []).append(module)
    integers = {}
    for modules in alike.values():
        first, *others = (module.__dict__ for module in modules)
        for module in modules:
            integers[id(module)] = tuple(
                (name, value)
                for name, value in first.items()
                if type(value) is int and value > 1
                if name not in INTEGER_ATTRIBUTES and not name.startswith("_")
                if all(other.get(name) == value for other in others)
            )
    return integers


def _facts(module: Any) -> tuple[tuple[str, int], ...]:
    """The integer attributes of the module; `__dict__` avoids the slow lookup of nn.Module."""
    attributes = module.__dict__
    facts = [
        (name, int(v)) for name in INTEGER_ATTRIBUTES if isinstance(v := attributes.get(name), int)
    ]
    kind = attributes.get("layer_type") or attributes.get("attention_type")
    if isinstance(kind, str) and "is_sliding" not in attributes:
        facts.append(("is_sliding", int(kind.startswith("sliding"))))
    # transformers' decorator of fused experts, which reads the choice in each forward, sets both
    config = attributes.get("config") if "_is_expert_parallel" in attributes else None
    if getattr(config, "_experts_implementation", None) == GROUPED:
        facts.append((GROUPED, 1))
    return (*facts, *_fused_experts(module), *_puts_images(module))


def _fused_experts(module: Any) -> Iterator[tuple[str, int]]:
    """The number of fused experts, by the parameters of the forward and the shapes of weights."""
    count = module.__dict__.get("num_experts")
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    if not shapes or not isinstance(count, int) or any(s[:1] != (count,) for s in shapes):
        return
    if type(module).__name__ in _BATCHED:
        yield BATCHED_EXPERTS, count
    elif len(signature(type(module).forward).parameters) == 4:  # with self
        yield FUSED_EXPERTS, count
        if getattr(module, "is_transposed", False):
            yield TRANSPOSED_EXPERTS, 1


def routed_experts(module: Any) -> int | None:
    """The number of fused experts of a module that is not parallel yet; None where it has none."""
    return dict(_fused_experts(module)).get(FUSED_EXPERTS)


def _puts_images(module: Any) -> Iterator[tuple[str, int]]:
    """Whether the code of transformers' forward embeds tokens, and then asks for the features of
    images, or of sound alone; where videos have a tower of their own, the two may come in either
    order.
    """
    if LANGUAGE_MODEL not in module._modules or "video_tower" in module._modules:
        return
    names = unwrap(type(module).forward).__code__.co_names
    asked = [n for n in names if n in ("get_input_embeddings", _FEATURES[0], _SOUND)]
    if asked == ["get_input_embeddings", _SOUND]:
        yield PUTS_SOUND, 1
    if [n for n in asked if n != _SOUND] == ["get_input_embeddings", _FEATURES[0]]:
        yield PUTS_IMAGES, 1
        feature_names, others = (_code_names(type(module), n) for n in (_FEATURES, ("forward",)))
        for name in (*module._modules, *module._parameters):
            if name in feature_names and name != LANGUAGE_MODEL:
                yield f"{OF_IMAGES}{name}", 1 + (name in others)


_FEATURES = ("get_image_features", "get_video_features")
"""The methods that compute features of images."""
_SOUND = "get_audio_features"
"""The method that computes features of sound."""


def _code_names(cls: Any, methods: Sequence[str]) -> set[str]:
    """The names in the code of methods, and of those that it calls, but for `_FEATURES`."""
    names, waiting, seen = set[str](), [*methods], {*_FEATURES} - {*methods}
    while waiting:
        if (name := waiting.pop()) in seen:
            continue
        seen.add(name)
        method: Any = getattr(cls, name, None)
        method = unwrap(method)
        user_defined = str(getattr(method, "__module__", "")).partition(".")[0] != "torch"
        if user_defined and isinstance(method, FunctionType):
            names.update(method.__code__.co_names)
            waiting += method.__code__.co_names
    return names


def _kind(module: Any) -> str:
    from torch import nn

    name = type(module).__name__
    match module:
        case nn.Linear():
            return "linear"
        case nn.Embedding():
            return "embedding"
        case nn.ModuleList() | nn.Sequential():
            return "list"
        case nn.ModuleDict():
            keys = [*module._modules]
            numbers = keys and keys == [str(i) for i in range(len(keys))] and name == MODULE_DICT
            return "list" if numbers else "dict"
        case nn.Dropout() if module.p > 0:
            return "dropout"
    if name == "Conv1D" and "nf" in module.__dict__:  # transformers' transposed linear
        return "conv1d"
    if "Norm" in name and not module._modules:
        return "norm"
    return "other"


def _ties(module: Any) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _mapping(config: Any) -> dict[str, Any]:
    """The configuration as JSON data, so that it is the same built and read from the cache."""
    values: Any = {}
    if isinstance(config, Mapping):
        values = dict(config)
    elif callable(getattr(config, "to_dict", None)):
        values = config.to_dict()
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    elif config is not None:
        values = dict(getattr(config, "__dict__", {}))
    try:
        plain = json.loads(json.dumps(values, default=_text, skipkeys=True))
    except (ValueError, RecursionError):  # a circular reference
        plain = {k: v for k, v in values.items() if isinstance(v, str | int | float | None)}
    return plain if isinstance(plain, dict) else {}


def _text(value: Any) -> str:
    return str(value).removeprefix("torch.")  # a dtype, as config.json spells it
