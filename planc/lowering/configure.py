"""Changes to the model's configuration that training needs."""

from collections.abc import Iterator, Mapping

from planc.model.facts import Facts
from planc.ops.configure import Configure


def configure(facts: Facts) -> Iterator[Configure]:
    """Disables the key/value cache: it costs memory and breaks activation checkpointing.

    A multimodal model has the field in the configuration of each part (`text_config`).
    """
    inner = {f"{n}.": part for n, part in facts.config.items() if isinstance(part, Mapping)}
    for owner, values in {"": facts.config, **inner}.items():
        if values.get("use_cache") is True:
            reason = "training keeps no key/value cache"
            yield Configure(name=f"{owner}use_cache", value=False, reason=reason)
