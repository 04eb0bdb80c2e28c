"""What comes before anything is made of the model: its configuration, and how weights arrive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planc.model.facts import Facts
from planc.ops.configure import Configure
from planc.ops.load import Load
from planc.plan.ir import Plan


def configure(facts: Facts) -> Iterator[Configure]:
    """A key/value cache is for generation; in training it costs memory and breaks checkpointing.

    A model of several towers has the field in the configuration of each (`text_config`).
    """
    inner = {
        f"{name}.": value for name, value in facts.config.items() if isinstance(value, Mapping)
    }
    for owner, values in {"": facts.config, **inner}.items():
        if values.get("use_cache") is True:
            reason = "training keeps no key/value cache"
            yield Configure(name=f"{owner}use_cache", value=False, reason=reason)


def arrive(plan: Plan) -> Iterator[Load]:
    if plan.load is not None:
        own = plan.load
        yield Load(
            meta=own.meta,
            weights=own.weights,
            dtype=own.dtype,
            fp32=own.fp32,
            place=own.origin.place,
        )
