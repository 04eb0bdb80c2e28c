"""A peer's file -> a plan, and what became of each of its keys."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from planc.diagnostics.diagnostic import Sink, one_of
from planc.syntax.formatter.layout import laid_out
from planc.syntax.plan_files import ANY, written_family
from planc.tools.importers import reading
from planc.tools.importers.family import Base, base_of, families_named, family_of, named_by
from planc.tools.importers.peer import LEFT, LOST, REASONS, ConfigKey, Peer, matches, peers, table
from planc.tools.importers.settings import Unknown, value_of
from planc.tools.importers.transformers_plans import PLANS
from planc.tools.importers.writing import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The plan of a peer's file, and the fate of each key.

    Args:
        peer: whose file it was.
        fate: for each leaf of the file, `plan`, `same` (as without the key), `left`, `lost`, `cost`
            (lost, and no number depends on it) or `unknown`; and the line of the plan that it
            became, or the reason.
    """

    peer: Peer
    text: str
    fate: tuple[tuple[ConfigKey, str, str], ...]

    def count(self, *kinds: str) -> int:
        """The number of leaves of these kinds."""
        return sum(kind in kinds for _, kind, _ in self.fate)


def import_plan(name: str, sink: Sink, *, peer: str | None, model: str | None) -> Imported | None:
    """The plan that a peer's file stands for, or None after an error (PL730 to PL732, PL737).

    Args:
        name: the file; `FILE.py:FUNCTION` for one configuration of a Python file.
        sink: receives also the warnings PL733 to PL736 and PL738.
        peer: whose file it is; None to recognize it.
        model: the model that the plan is for; None for what the file names.
    """
    path, colon, function = name.rpartition(":")
    if not (colon and path.endswith(".py")):
        path, function = name, ""
    text = reading.text_of(path, sink)
    if text is None or (peer is None and _report_refused(path, text, sink)):
        return None
    leaves = reading.leaves(path, text, function or None, sink)
    whose = None if leaves is None else _recognize(path, leaves, peer, sink)
    if leaves is None or whose is None:
        return None
    fate: list[tuple[ConfigKey, str, str]] = []
    settings = _settings(whose, leaves, fate, sink)
    given = {word: value for word, (value, _) in settings.items()}
    if function:
        given["model"], given["flavor"] = named_by(function, given.get("flavor"))
    base = _base(given, model, sink, exact=whose.exact)
    if base is None:
        return None
    _report_no_rule(given, settings, sink)
    keys = {word: _keys(leaf.path for leaf in by) for word, (_, by) in settings.items()}
    writer = Writer(base, whose, given, keys)
    sections = writer.plan_lines()
    for word, (_, by) in settings.items():
        fate += [(leaf, *writer.fate.get(leaf.path, writer.fate_of(word))) for leaf in by]
    implied = writer.implied_fates
    fate = [(leaf, *implied.get(why, (kind, why))) for leaf, kind, why in fate]
    _warn(fate, path, sink)
    file = Path(path)
    stem = re.sub(r"\W", "_", function or file.stem) or "imported"
    name = stem if stem[0].isalpha() else f"p_{stem}"
    header = [
        f"# Written by `planc import` from {_safe(file.name)}, of {whose.title}.",
        *writer.header,
        f"plan {name} for {written_family(base.family or ANY)}",
    ]
    body = laid_out("\n".join([*header, "", *sections])).rstrip("\n")
    rest = [line for kind in _TITLES for line in _key_lines(fate, kind)]
    return Imported(peer=whose, text="\n".join([body, "", *rest, ""]), fate=tuple(fate))


def _report_refused(path: str, text: str, sink: Sink) -> bool:
    """Reports PL732 where the file is of a library that planc knows by name alone."""
    for title, pattern in table("others")["refused"].items():
        if re.search(pattern, text):
            message = f"{path} is a file of {title}, which is not a library planc reads"
            help = f"planc reads {one_of((p.title for p in peers().values()), last='and')}"
            sink.error("PL732", message, help=help)
            return True
    return False


def _report_no_rule(
    given: dict[str, Any], settings: dict[str, tuple[Any, list[ConfigKey]]], sink: Sink
) -> None:
    """Reports PL763: transformers documents an empty plan, which a deprecated flag stands for too,
    and refuses it.
    """
    size = given.get("tp_size") or 1
    if given.get("expert_parallel") and not (given.get("ep_size") or given.get("rule")):
        given["no_rule"] = True
    if size == 1 or not given.get("no_rule"):
        return
    leaf = settings["no_rule" if "no_rule" in settings else "expert_parallel"][1][0]
    written = f"{_safe(leaf.path)} = {leaf.value}"
    message = f"transformers 5.23 refuses `{written}` with tp_size = {size}: it has no rules"
    help = "leave `tp_plan` out for the rules of the model, or set `tp_size = 1`"
    if "expert_parallel" in given or (given.get("ep_size") or 1) > 1:
        help += f" and `fsdp_size = {size}`: experts are then divided over data ranks"
    sink.warning("PL763", message, help=help)


def _recognize(
    path: str, leaves: tuple[ConfigKey, ...], named: str | None, sink: Sink
) -> Peer | None:
    suffix, paths = Path(path).suffix.lower(), tuple(leaf.path for leaf in leaves)
    if named:
        return peers()[named]
    known = [p for p in peers().values() if suffix in p.suffixes]
    if not known and suffix not in (".json", ".toml", ".py"):
        known = [p for p in peers().values() if "" in p.suffixes]
    best = max(known, key=lambda p: p.marks(paths), default=None)
    if best is not None and best.marks(paths):
        return best
    titles = one_of(p.title for p in peers().values())
    help = f"name the library: --from {one_of(peers())}"
    sink.error("PL732", f"{path} looks like no configuration of {titles}", help=help)
    return None


def _settings(
    peer: Peer, leaves: tuple[ConfigKey, ...], fate: list[tuple[ConfigKey, str, str]], sink: Sink
) -> dict[str, tuple[Any, list[ConfigKey]]]:
    """The settings of the file with the leaves that decide them; all other leaves go to `fate`."""
    result: dict[str, tuple[Any, list[ConfigKey]]] = {}
    of_model = any(matches(p, leaf.path) for p in peer.model_file.split() for leaf in leaves)
    words = {leaf.path: peer.meaning(leaf.path) for leaf in leaves}
    scaled = any(words[leaf.path] == "fp16" and leaf.value not in _OFF for leaf in leaves)
    for leaf in leaves:
        word = words[leaf.path]
        if word is None and of_model and not leaf.path.startswith("distributed_config."):
            word = "model_left"
        meant = peer.suggest_key(leaf.path) if word in REASONS else None
        if meant:
            fate.append((leaf, "unknown", f"did you mean {meant}?"))
        elif word in LEFT:
            fate.append((leaf, "left", LEFT[word]))
        elif word in REASONS:
            off = not scaled if word == "scaler" else leaf.value in _OFF
            kind = "lost" if word in LOST else "cost"
            fate.append((leaf, "same", "off") if off else (leaf, kind, REASONS[word]))
        elif word == "rule" and leaf.value == {}:
            _add(result, "no_rule", True, leaf, sink)
        elif word is None:
            fate.append((leaf, *_fate_without_meaning(leaf)))
        else:
            try:
                value = value_of(word, _leaf_value(leaf, word, peer))
            except Unknown as error:
                where = f" in line {leaf.line}" if leaf.line else ""
                message = f"`{_safe(leaf.path)}`{where} has the unknown value {_shown(leaf.value)}"
                sink.warning("PL735", message, help=f"known are {error}")
                fate.append((leaf, "lost", f"unknown value {_shown(leaf.value)}"))
                continue
            if value is None:
                fate.append((leaf, "same", "not set"))
            elif word in PLANS:
                result.setdefault(word, ({}, []))[0][leaf.path] = value
                result[word][1].append(leaf)
            else:
                _add(result, word, value, leaf, sink)
    return {word: (value, []) for word, value in peer.absent.items()} | result


def _fate_without_meaning(leaf: ConfigKey) -> tuple[str, str]:
    """The fate of a key that the tables do not have, and the reason."""
    if str(leaf.value).endswith("()"):
        return "left", LEFT["tool"]
    if leaf.value in (None, {}, []):
        return "same", "empty"
    return "unknown", "not a key that planc knows"


def _leaf_value(leaf: ConfigKey, word: str, peer: Peer) -> Any:
    """The value of a leaf: True in a table that switches on what it is named after."""
    below = peer.spelling(leaf.path) not in peer.keys[word].split()
    table = leaf.value == {} or below
    return True if peer.tables_on and table and word in _SWITCHES else leaf.value


def _add(
    result: dict[str, tuple[Any, list[ConfigKey]]],
    word: str,
    value: Any,
    leaf: ConfigKey,
    sink: Sink,
) -> None:
    """Takes a value; the strongest of several keys for one setting holds, or the last one."""
    before, by = result.get(word, (value, []))
    if by and before != value and by[-1].path == leaf.path:
        path, shown = _safe(leaf.path), _shown(value)
        message = f"`{path}` stands twice, and the last value holds: {shown}"
        sink.warning("PL738", message, help="write it once, as the run has it")
    elif by and word in _STRONGER:
        value = max(before, value, key=_STRONGER[word].index)
    elif by and (word == "model" or value in (False, 1)):
        value = before
    result[word] = (value, [*by, leaf])


def _base(given: dict[str, Any], model: str | None, sink: Sink, *, exact: bool) -> Base | None:
    """The plan to extend; None after an error about the model that the user names.

    Args:
        exact: whether the file's word for the model is a `model_type`, of which nothing is guessed.
    """
    family = families_named(model, sink) if model else None
    if model and family is None:
        return None
    if model is None:
        words = [given.get(word) for word in ("model", "flavor", "block_class")]
        family, model = (words[0], None) if exact and words[0] else family_of(*words)
        if family and not model and not exact and any(family_of(words[0], words[1], None)):
            name = _safe(str(words[0] or words[1]))
            sink.warning(
                "PL647",
                f"the family {family} is a guess from the name {name}",
                help="name a model with the same configuration: --model MODEL",
            )
    base = base_of(family, model, sink)
    if not (base.known or given.get("rule") or given.get("ep_rule")):
        what = f"no plan is for {family}" if family else "the file does not tell the family"
        sink.warning(
            "PL733",
            f"{what}: the imported plan has no rules that split weights",
            help="name the model: --model MODEL; `planc init MODEL` drafts a plan for any",
        )
    return base


def _warn(fate: list[tuple[ConfigKey, str, str]], path: str, sink: Sink) -> None:
    help = "comments at the end of the plan list each with the reason"
    if keys := _some(fate, "unknown"):
        sink.warning("PL734", f"{path} has {keys}, unknown to planc", help=help)
    if keys := _some(fate, "lost"):
        sink.warning("PL736", f"{path} has {keys}, which no line of the plan says", help=help)


def _some(fate: list[tuple[ConfigKey, str, str]], kind: str) -> str:
    paths = list(dict.fromkeys(leaf.path for leaf, of, _ in fate if of == kind))
    return _keys(paths[:6]) + (f" and {len(paths) - 6} more keys" if len(paths) > 6 else "")


_STRONGER = {"checkpoint": ("none", "ops", "full", "offload")}
_SWITCHES = ("checkpoint", "compile", "activation_offload")
_OFF: tuple[Any, ...] = (
    None,
    False,
    "",
    "none",
    "None",
    0,
    "no",
    [],
    {},
    "auto",
    "fp32",
    "no_shard",
)
_TITLES = {
    "same": "what planc does without the key",
    "lost": "not in this plan, for you to decide",
    "cost": "not in this plan, and no number depends on it",
    "unknown": "unknown to planc",
    "left": "not for a plan",
}


def _key_lines(fate: list[tuple[ConfigKey, str, str]], kind: str) -> Iterator[str]:
    """Comment lines with all keys of one kind, by reason."""
    by: dict[str, list[str]] = defaultdict(list)
    for leaf, of, why in fate:
        if of == kind:
            shown = f" = {_shown(leaf.value)}" if kind in ("lost", "cost") else ""
            by[why].append(f"{leaf.path}{shown}")
    if by:
        total = sum(map(len, by.values()))
        yield f"# {_TITLES[kind]}, {total} key{'s' * (total != 1)}:"
    for why, keys in by.items():
        text = f"{why}: {', '.join(map(_safe, keys)) if kind in ('lost', 'cost') else _keys(keys)}"
        lines = wrap(text, 92, break_long_words=False, break_on_hyphens=False)
        yield from (f"#   {'  ' * bool(i)}{line}" for i, line in enumerate(lines))


def _keys(paths: Iterable[str]) -> str:
    """Keys as one text: those below the same key in braces."""
    groups: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        holder, dot, last = path.rpartition(".")
        groups.setdefault(f"{_safe(holder)}{dot}", []).append(_safe(last))
    return ", ".join(
        f"{holder}{{{', '.join(lasts)}}}"
        if len(lasts) > 1 and holder
        else ", ".join(f"{holder}{last}" for last in lasts)
        for holder, lasts in groups.items()
    )


def _safe(text: str) -> str:
    """A text of a stranger's file on one line of a comment."""
    return "".join(c if c.isprintable() else " " for c in text)[:200]


def _shown(value: Any) -> str:
    text = _safe(str(value))
    return text if len(text) <= 40 else f"{text[:37]}..."
