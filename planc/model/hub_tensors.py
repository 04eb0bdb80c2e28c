"""The tensors of a model's files, and which block of the model's own tensors each of them is.

Layers of one kind share an entry: names have `{}` for each index of a list. transformers is asked
once for a configuration; the cache has the answer afterwards, also without torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from planc.model import cache
from planc.model.checkpoint_conversion import HubNames, recipes, written_name
from planc.model.facts import Facts, Modules
from planc.model.hub_pieces import Assembled, HubPiece, Shape, assemble, whole_tensor

_FORMAT = 1


class UnknownHubError(Exception):
    """The tensors of the files are not known, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubWeight:
    """A parameter or a persistent buffer of like modules, and its pieces.

    Args:
        modules: of which each has the tensor.
        name: in the module.
        shape, dtype: of the model's tensor.
        pieces: blocks of it; a name has `{}` for each index of a list in the path of a module.
        buffer: whether it is a buffer, which is replicated on all ranks.
        tied: the names, with `{}`, under which other modules have the same tensor.
    """

    modules: Modules
    name: str
    shape: Shape
    dtype: str
    pieces: tuple[HubPiece, ...]
    buffer: bool = False
    tied: tuple[str, ...] = ()

    @property
    def shapes(self) -> Iterator[tuple[str, Shape]]:
        """The tensors of the files, and their shapes."""
        for piece in self.pieces:
            sizes = {d: n for d, n in zip(piece.dims, piece.size, strict=True) if d is not None}
            yield piece.hub, tuple(sizes[d] for d in sorted(sizes))


def hub_tensors(facts: Facts) -> tuple[HubWeight, ...]:
    """All tensors that the files of a model have, in the order of the model.

    Args:
        facts: the model, without adapters.

    Raises:
        UnknownHubError: a conversion is not known, or the model has no configuration.
    """
    if (known := facts.memo.get(hub_tensors)) is not None:
        return tuple(known)
    config = {**facts.config, "class": facts.name}
    key = cache.entry_name(f"hub tensors {_FORMAT}", config=config)
    data = None if facts.lacks_config or facts.own_code else cache.recall(key)
    if data is None:
        data = _find(facts)
        cache.keep(key, data)
    sets = {modules.first_name: modules for modules in facts.model.below()}
    weights = tuple(_decode(row, sets) for row in data)
    facts.remember(hub_tensors, weights)
    return weights


def _decode(row: list[Any], sets: Mapping[str, Modules]) -> HubWeight:
    path, name, shape, dtype, pieces, buffer, tied = row
    return HubWeight(
        modules=sets[path],
        name=name,
        shape=tuple(shape),
        dtype=dtype,
        pieces=tuple(
            HubPiece(hub=hub, start=tuple(start), size=tuple(size), dims=tuple(dims))
            for hub, start, size, dims in pieces
        ),
        buffer=buffer,
        tied=tuple(tied),
    )


def _find(facts: Facts) -> list[list[Any]]:
    """The tensors of the model's files, as values for JSON.

    transformers converts the names of the first and the last of like modules; those between follow.
    """
    plain = _on_meta(facts)
    state = {n: t for n, t in plain.state_dict(keep_vars=True).items() if hasattr(t, "shape")}
    same = {name: group for group in facts.ties for name in group}
    kept = {group: written_name(plain, group) for group in facts.ties}
    names_by_module: dict[str, list[str]] = {}
    for name in state:
        names_by_module.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
    rows, names = list[tuple[Modules, str, str, str]](), dict[str, Any]()
    for modules in facts.model.below():
        first, last = modules.first_name, _last_name(modules)
        for tensor in names_by_module.get(first, ()):
            name, other = (f"{path}.{tensor}" if path else tensor for path in (first, last))
            if name in same and kept[same[name]] != name:
                continue
            rows.append((modules, tensor, name, other))
            names |= {name: state[name].detach().to("meta"), other: state[other].to("meta")}
    pieces = _pieces(plain, names)
    weight_rows = []
    for modules, tensor, name, other in rows:
        shape, dtype = tuple(state[name].shape), str(state[name].dtype).removeprefix("torch.")
        if pieces[name].shape != shape or _elements(pieces[name]) != prod(shape):
            raise UnknownHubError(f"the tensors of the files do not cover {name}")
        entries = [*_templates(pieces, name, other)]
        buffer = modules.module.parameter(tensor) is None
        others = [n for n in same.get(name, ()) if n != name]
        weight_rows.append([modules.first_name, tensor, shape, dtype, entries, buffer, others])
    return weight_rows


def _elements(assembled: Assembled) -> int:
    return sum(prod(piece.size) for piece in assembled.pieces)


def _templates(pieces: Mapping[str, Assembled], name: str, other: str) -> Iterator[list[Any]]:
    """The pieces of like modules, by those of the first and the last of them."""
    for piece, last in zip(pieces[name].pieces, pieces[other].pieces, strict=True):
        template = _template(piece.hub, name)
        if template.format(*_numbers(other)[: template.count("{}")]) != last.hub:
            raise UnknownHubError(f"{piece.hub} and {last.hub} are not named alike")
        yield [template, piece.start, piece.size, piece.dims]


def _pieces(plain: Any, tensors: Mapping[str, Any]) -> dict[str, Assembled]:
    """The pieces of some tensors of a model."""
    hub, full = HubNames(plain), dict[str, Any]()
    for names in hub.converted_together([*tensors]):
        full |= hub.to_stored({name: tensors[name] for name in names})
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    if shapes.keys() <= tensors.keys():
        return {name: whole_tensor(name, shape) for name, shape in shapes.items()}
    pieces = dict[str, Assembled]()
    for name, recipe in recipes(plain, shapes, tensors).items():
        assembled = assemble(recipe, shapes)
        if isinstance(assembled, str):
            raise UnknownHubError(f"{name}: {assembled}")
        pieces[name] = assembled
    if missing := [name for name in tensors if name not in pieces]:
        raise UnknownHubError(f"no tensor of the files is known for {missing[0]}")
    return pieces


def _template(hub: str, name: str) -> str:
    """A name of the files with `{}` for the indices that the name in the model has, in order."""
    waiting, parts = list(_numbers(name)), list[str]()
    for part in hub.split("."):
        if waiting and part == waiting[0]:
            waiting.pop(0)
            parts.append("{}")
        else:
            parts.append(part)
    return ".".join(parts)


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part.isdecimal())


def indices_of(modules: Modules) -> Iterator[tuple[int, ...]]:
    """The indices of each of like modules, as names of tensors have them."""
    for name in modules.names():
        yield tuple(map(int, _numbers(name)))


def _last_name(modules: Modules) -> str:
    return ".".join(s if isinstance(s, str) else str(s.last) for s in modules.path)


def _on_meta(facts: Facts) -> Any:
    """The model that transformers builds from the configuration, without memory."""
    if facts.lacks_config or cache.missing():
        raise UnknownHubError(f"{facts.name} has no configuration that transformers builds")
    import torch

    from planc.diagnostics.diagnostic import Sink
    from planc.model.config import config_of
    from planc.model.sources.huggingface import prepare, quiet
    from planc.model.sources.isolation import isolate

    values = {**facts.config, "architectures": [facts.name]}
    prepared = prepare(config_of(values, facts.config_name), Sink())
    if prepared is None:
        raise UnknownHubError(f"transformers does not build {facts.name}")
    with quiet(), isolate(), torch.device("meta"):
        return prepared[0]._from_config(prepared[1])
