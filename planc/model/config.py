"""Locates, reads and validates the configuration of a model."""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Any

from planc.diagnostics.diagnostic import Sink, io_reason
from planc.files.resources import GRAMMARS, PLANS

_MAX_BYTES = 5_000_000
_MAX_NESTING = 64
_SPECIAL_FLOATS = ("Infinity", "-Infinity", "NaN")
CLASS = "_class_name"
"""The field with the class in every configuration written by diffusers."""
CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
    "top_k",
)
"""The fields with the number of experts that a token goes to, by family."""


def is_diffusers(values: Mapping[str, Any]) -> bool:
    """Whether the fields are the configuration of a diffusers model."""
    return CLASS in values and "model_type" not in values


def buildable(values: Mapping[str, Any]) -> bool:
    """Whether the fields name a model of transformers or of diffusers."""
    return "model_type" in values or is_diffusers(values)


def text_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a model's language model; empty where it has none of its own."""
    inner = values.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


def integer_of(values: Mapping[str, Any], *names: str) -> int | None:
    """The first of some fields that is an integer, of the model or of its language model."""
    values_of_names = (part.get(name) for part in (values, text_of(values)) for name in names)
    return next((v for v in values_of_names if isinstance(v, int)), None)


def chosen_experts(values: Mapping[str, Any]) -> int | None:
    """The number of experts that a token goes to."""
    return integer_of(values, *CHOSEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A configuration as read from its file."""

    name: str
    path: Path
    values: dict[str, Any]

    @property
    def own_code(self) -> dict[str, str]:
        """The classes that the model's folder defines, by the auto class they stand for."""
        auto_map = self.values.get("auto_map")
        if not isinstance(auto_map, dict):
            return {}
        return {k: v for k, v in auto_map.items() if isinstance(v, str)}

    @property
    def own_model(self) -> str:
        """The auto class that the folder's own model class stands for; empty for none."""
        names = [name for name in self.own_code if name.startswith("AutoModel")]
        built = self.values.get("architectures") or ()
        first = [n for n in names if self.own_code[n].rpartition(".")[2] in built]
        return next(iter((*first, *(n for n in names if n == "AutoModelForCausalLM"), *names)), "")

    def valid(self, sink: Sink) -> bool:
        """Whether the configuration fits the schema; each field that does not is PL603."""
        schema = json.loads((GRAMMARS / "config.schema.json").read_text(encoding="utf-8"))
        if is_diffusers(self.values):
            schema["required"] = [CLASS]
        validator = _strict()(schema)
        problems = [leaf for e in validator.iter_errors(self.values) for leaf in _leaves(e)]
        for problem in sorted(problems, key=lambda e: list(map(str, e.absolute_path))):
            where = ".".join(str(p) for p in problem.absolute_path)
            if problem.validator == "required":  # jsonschema does not name the field
                for field in (f for f in problem.validator_value if f not in problem.instance):
                    help = 'add it: `"model_type": "llama"`, for example'
                    sink.error("PL603", f"{self.name} lacks `{field}`", help=help)
                continue
            wanted = " or ".join(dict.fromkeys(_words(dict(problem.schema))))
            shown = _shown(problem.instance)
            sink.error("PL603", f"`{where}` is {shown} in {self.name}; it must be {wanted}")
        return not problems


def config_of(values: dict[str, Any], name: str) -> Config:
    """A configuration that does not come from a file."""
    return Config(name=name, path=Path(name), values=values)


def _strict() -> Any:
    """A validator that rejects 1.0 as an integer, which JSON Schema accepts."""
    import jsonschema

    def integer(_: Any, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    draft = jsonschema.Draft202012Validator
    return jsonschema.validators.extend(  # type: ignore[no-untyped-call]
        draft, type_checker=draft.TYPE_CHECKER.redefine("integer", integer)
    )


def _leaves(error: Any) -> list[Any]:
    """The error itself, or the nested errors if the field is an object or a list."""
    deeper = [e for e in error.context or () if len(e.absolute_path) > len(error.absolute_path)]
    return [leaf for e in deeper for leaf in _leaves(e)] or [error]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _words(schema: dict[str, Any]) -> Iterator[str]:
    """Yields each kind of value that a part of the schema allows, in words."""
    names = {
        "integer": "an integer",
        "number": "a number",
        "string": "a text",
        "boolean": "true or false",
        "array": f"a list of {schema['maxItems']}" if "maxItems" in schema else "a list",
        "object": "an object",
        "null": "null",
    }
    if "$ref" in schema:
        size = "a positive integer"
        yield from {"size": [size], "perhaps": [size, "null"]}.get(
            schema["$ref"].rpartition("/")[2], [size, "a list of them"]
        )
        return
    for option in schema.get("anyOf", ()):
        yield from _words(option)
    if "minimum" in schema and schema.get("type") == "integer":
        end = f" to {schema['maximum']:,}" if "maximum" in schema else ""
        yield f"an integer from {schema['minimum']:,}{end}"
        return
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        yield "a positive number" if "exclusiveMinimum" in schema else names[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The path of a configuration file and its name in messages."""

    name: str
    path: Path


def locate_config(model: str) -> ConfigFile | None:
    """The configuration file that a model name refers to, or None if there is none."""
    path = Path(model)
    known = PLANS / "models" / f"{model}.json"
    try:
        mode = path.stat().st_mode if model else None
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except PermissionError:  # of a parent folder; `read` reports it
        return ConfigFile(name=model, path=path)
    except (OSError, ValueError):  # the name is too long or contains NUL
        return None
    if mode is not None and stat.S_ISDIR(mode):
        inner = _config_path(path)
        return ConfigFile(name=f"{model.rstrip('/')}/{inner}", path=path / inner)
    if mode is not None:
        return ConfigFile(name=model, path=path)
    if re.fullmatch(r"[\w.-]+", model) and known.is_file():
        return ConfigFile(name=f"plans/models/{model}.json", path=known)
    return _in_hub_cache(model)


def _config_path(folder: Path) -> str:
    """The path of the configuration in a folder; a diffusers pipeline has it in `transformer/`."""
    pipeline = not (folder / "config.json").exists() and (folder / "model_index.json").exists()
    return "transformer/config.json" if pipeline else "config.json"


def shipped_models() -> tuple[str, ...]:
    """The names of the models whose configurations ship with planc."""
    return tuple(sorted(p.stem for p in (PLANS / "models").glob("*.json")))


def _in_hub_cache(model: str) -> ConfigFile | None:
    """The configuration of a hub model that is in the local cache; nothing is downloaded."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        return None
    path = _snapshot(model)
    if path is None:
        try:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(model, "config.json")
        except Exception:  # not a valid repository name
            return None
        path = Path(cached) if isinstance(cached, str) else None
    if path is None:
        return None
    inner = "transformer/" if path.parent.name == "transformer" else ""
    return ConfigFile(name=f"{model}/{inner}config.json", path=path)


def _snapshot(model: str) -> Path | None:
    """The same, without importing huggingface_hub, which takes longer than a check.

    Source of the layout: "Understand caching" in huggingface_hub's guides.
    """
    get = os.environ.get
    try:
        home = Path(get("HF_HOME") or Path(get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
        hub = Path(get("HF_HUB_CACHE") or get("HUGGINGFACE_HUB_CACHE") or home / "hub")
        repository = hub.expanduser() / f"models--{model.replace('/', '--')}"
        commit = (repository / "refs" / "main").read_text(encoding="ascii").strip()
        snapshot = repository / "snapshots" / commit
        path = snapshot / _config_path(snapshot)
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def read(place: ConfigFile, sink: Sink) -> Config | None:
    """The fields of a configuration file, or None after a finding (PL601, PL602)."""
    try:
        if not stat.S_ISREG(place.path.stat().st_mode):  # reading a pipe could block
            raise OSError(0, "it is not a regular file")
        with place.path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        message = f"cannot read {place.name}: {io_reason(error)}"
        help = "a model's folder contains config.json" if error.errno == ENOENT else None
        sink.error("PL601", message, help=help)
        return None
    if len(data) > _MAX_BYTES:
        sink.error("PL602", f"{place.name} is larger than {_MAX_BYTES:,} bytes: no configuration")
        return None
    try:
        values = json.loads(data.decode("utf-8-sig"), object_hook=_special_float)
        if too_deep(values):
            raise RecursionError
        if isinstance(values, dict):
            return Config(name=place.name, path=place.path, values=values)
        problem = f"contains {_shown(values)}, not an object"
    except UnicodeDecodeError:
        problem = "is not JSON: it is not UTF-8 text"
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        problem = f"is not JSON: {error.msg.lower()} at {where}"
    except RecursionError:
        problem = "is not JSON that can be read: it is nested too deeply"
    except ValueError:  # Python's limit on the digits of an integer
        problem = "is not JSON that can be read: a number is too long"
    sink.error("PL602", f"{place.name} {problem}")
    return None


def _special_float(value: dict[str, Any]) -> Any:
    """A float that JSON lacks, which transformers writes as an object; any other object as it is.

    Source: `PreTrainedConfig._decode_special_floats`.
    """
    name = value.get("__float__")
    return float(name) if len(value) == 1 and name in _SPECIAL_FLOATS else value


def too_deep(values: Any) -> bool:
    level = [values]
    for _ in range(_MAX_NESTING):
        inner = [v for v in level if isinstance(v, dict | list)]
        level = [c for v in inner for c in (v.values() if isinstance(v, dict) else v)]
    return bool(level)
