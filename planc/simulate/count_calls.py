"""Counts the calls of the blocks of a plan in one forward pass of one rank on fake tensors.

The run is a separate process, and its result is cached: a warm check imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from planc.files.resources import cache_folder
from planc.ir.nodes import Plan
from planc.ir.optimizer_dtype import assume_fp32_steps
from planc.ir.stand_in import kinds_of
from planc.lowering import lower
from planc.model import cache
from planc.model.facts import Facts, Modules, most_stored
from planc.model.layer_kinds import block_lists
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.document import digest, dumps
from planc.simulate.call_table import CallTable
from planc.simulate.rank_job import RankJob, RankRunner, RankStep

_FORMAT = "calls 1"
"""Raised when what is counted changes."""
_KNOWN: dict[str, dict[str, CallTable]] = {}
"""The tables that this process has counted or read."""


class UncountedError(Exception):
    """Why the calls of a plan's blocks cannot be counted."""


def count_calls(
    plan: Plan, facts: Facts, modules: Iterable[Modules], rows: int, seq: int
) -> Mapping[str, CallTable]:
    """The calls of modules, by the modules' names.

    Args:
        plan, facts: as lowered, with adapters applied.
        modules: that are checkpointed.
        rows, seq: of one forward pass of a rank: sequences, and tokens of each before it is split.

    Raises:
        UncountedError: a rank alone, without values, cannot run them.
    """
    _require_countable(plan, facts)
    plan = assume_fp32_steps(plan, facts) or plan
    all_modules = tuple(modules)
    rules = tuple(Checkpoint(modules=at) for at in all_modules)
    bare = replace(plan.with_checkpoint_rules(rules), pipeline=None, optimizer=())
    precision = plan.fsdp.precision if plan.fsdp else None
    if precision and precision.param and plan.load and not plan.load.fp32:
        bare = replace(bare, load=None)  # FSDP casts what is computed with
    lowered = lower(bare, facts)
    if any(op.READS_VALUES for op in lowered.ops):
        raise UncountedError("quantized weights have values")
    key = cache.entry_name(
        f"{_FORMAT} {rows} x {seq}",
        digest(lowered),
        json.dumps(facts.config, sort_keys=True, default=str),
    )
    if key not in _KNOWN:
        data = cache.recall(key)
        try:
            _KNOWN[key] = _tables(data)
        except (KeyError, TypeError, IndexError, ValueError):  # missing or malformed
            step = RankStep(rows=rows, tokens=seq, micro_batches=1, dtype=most_stored(facts))
            job = RankJob(
                step=step,
                config={**facts.config, "architectures": [facts.name]},
                lowered=dumps(lowered),
                digest=digest(lowered),
                rank=0,
                calls=dict(_alike(all_modules, bare, facts)),
            )
            _KNOWN[key] = _tables(_run(job, key))
    return _KNOWN[key]


def _require_countable(plan: Plan, facts: Facts) -> None:
    if facts.code or facts.user_model is not None or "model_type" not in facts.config:
        raise UncountedError("it is not a transformers model that planc can build")
    if plan.fsdp is not None and plan.fsdp.backend is not None:
        raise UncountedError(f"{plan.fsdp.backend.TITLE} needs its library and all ranks")
    if cache.missing() and not cache.made_with():
        raise UncountedError(cache.not_installed())


def _run(job: RankJob, key: str) -> Any:
    if cache.missing():
        raise UncountedError(cache.unproved_reason())
    with _lock(key), RankRunner() as runner:
        if (known := cache.recall(key)) is not None:  # another rank of this machine has counted
            return known
        answer = runner.ask(job)
    if "error" in answer:
        raise UncountedError(answer["error"])
    cache.keep(key, answer)
    return answer


@contextmanager
def _lock(key: str) -> Iterator[None]:
    """Lets one process of a machine count at a time: all ranks ask for the same."""
    with ExitStack() as stack:
        with suppress(OSError, RuntimeError, ImportError):  # no folder to write, or no locks
            import fcntl

            cache_folder().mkdir(parents=True, exist_ok=True)
            path = cache_folder() / f"{key}.lock"
            held = stack.enter_context(path.open("w"))
            stack.callback(path.unlink, missing_ok=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _tables(data: Any) -> dict[str, CallTable]:
    tables = [CallTable.from_data(table) for table in data["tables"]]
    return {name: tables[at] for name, at in data["of"].items()}


def _alike(modules: Iterable[Modules], plan: Plan, facts: Facts) -> Iterator[tuple[str, str]]:
    """Each module, with the first one of its kind and under the same rules."""
    kinds: dict[str, Any] = {}
    for at in block_lists(facts.model):
        for index, kind in enumerate(kinds_of(at, plan, facts)):
            kinds[f"{at}.{index}"] = (str(at), kind)
    first: dict[Any, str] = {}
    for at in modules:
        for name in at.names():
            yield name, first.setdefault(kinds.get(name, name), name)
