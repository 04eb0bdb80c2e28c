"""The random numbers of a model in training, and of a script after it."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from planc.model.config_fields import DROPOUT, JITTER, SPEC_AUGMENT
from planc.model.facts import Facts


def random_fields(facts: Facts) -> tuple[str, ...]:
    """The configuration fields that make training use random numbers, as `name = value`.

    For a model that is not from transformers, its nn.Dropout modules are listed instead.
    """
    classifies = "Classification" in facts.name
    fields = [
        f"{name} = {value}"
        for name, value in _fields(facts.config)
        if classifies or not name.startswith("classifier_")
    ]
    if "model_type" not in facts.config:
        below = facts.model.below()
        fields += [f"{m.module.cls} modules" for m in below if m.module.kind == "dropout"][:1]
    return tuple(fields)


def spec_augment_fields(facts: Facts) -> tuple[str, ...]:
    """The fields of SpecAugment, whose masks transformers generates with numpy."""
    items = facts.config.items()
    fields = [(n, v) for n, v in items if SPEC_AUGMENT.search(n) and isinstance(v, float) and v > 0]
    on = facts.config.get("apply_spec_augment", True)
    return tuple(f"{name} = {value}" for name, value in fields if on)


def layer_drop_fields(facts: Facts) -> tuple[str, ...]:
    """The fields that make training skip whole layers at random."""
    return tuple(f"{n} = {v}" for n, v in _fields(facts.config) if n.endswith("layerdrop"))


def stated_noise(name: str, value: Any) -> Any:
    """A field's value if it is of dropout or jitter, else None."""
    return value if DROPOUT.search(name) or JITTER.search(name) else None


def with_noise(
    small: Mapping[str, Any],
    real: Mapping[str, Any],
    noise: Callable[[str, Any], Any] = stated_noise,
) -> dict[str, Any]:
    """A small configuration with what `noise` takes of each (name, value) of the real one."""
    noisy = dict(small)
    for name in real.keys() & noisy.keys():
        value, inner = real[name], noisy[name]
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            noisy[name] = with_noise(inner, value, noise)
        elif (taken := noise(name, value)) is not None:
            noisy[name] = taken
    return noisy


def _fields(config: Mapping[str, Any], owner: str = "") -> Iterator[tuple[str, float]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{owner}{name}.")
        elif not (DROPOUT.search(name) or JITTER.search(name)) or name.startswith("summary_"):
            continue  # gpt2's `summary_first_dropout` belongs to a summary head
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield f"{owner}{name}", value


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """A script draws afterwards what it would have drawn without the block. Else ranks of a run
    would go on differently, where one finds in the cache what another has to run.
    """
    if sys.modules.get("torch") is None:  # nothing was drawn
        yield
        return
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
