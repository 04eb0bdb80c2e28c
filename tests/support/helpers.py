"""What tests do with a plan's text, once: judge it, lower it, simulate it, change a shipped one.

A test of what a user sees belongs into tests/specs; these are for what has no command: facts
that no shipped model has, and values that are compared as objects.
"""

import re

import pytest
from folders import TESTS

import planc
from planc.checks import check
from planc.compiler import compile_plan, complete_plan
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.infer.apply_adapters import adapt_plan
from planc.lowering import lower
from planc.model.load import load
from planc.proof.layout_flow import flow
from planc.proof.small_case import small_case
from planc.syntax.parse import parse


def slow(*case):
    """A test's parameters that `make processes` runs, and `make test` leaves out."""
    return pytest.param(*case, marks=pytest.mark.slow)


def sampled(cases, every):
    """Cases of which `make test` runs one in so many, and `make processes` the others."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*c) if at % every == 0 else slow(*c) for at, c in enumerate(cases)]


def check_each(cases, check):
    """Runs a check on each case, and reports all cases that fail, each with its message."""
    failed = []
    for case in cases:
        try:
            check(case)
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} fail:\n" + "\n".join(failed)


def facts(model="llama-3.1-8b"):
    return load(model, Sink())


def elaborated(*texts, model="llama-3.1-8b", world=8, settings=()):
    """(plan, facts, sink) of plans, extended ones first, for a model's name or its facts."""
    known = facts(model) if isinstance(model, str) else model
    sink = Sink()
    names = ["t.plan"] if len(texts) == 1 else [f"{i}.plan" for i in range(len(texts))]
    files = [parse(Source(*pair), sink) for pair in zip(names, texts, strict=True)]
    plan = complete_plan(files, known, sink, world_size=world, settings=settings)
    return plan, known, sink


def judged(*texts, **options):
    """(plan, facts, findings that are not notes) after the structural checks."""
    plan, known, sink = elaborated(*texts, **options)
    if plan is not None:
        bare = plan, known
        plan, known = adapt_plan(plan, known)
        check(plan, known, sink, bare=bare)
    return plan, known, [d for d in sink if d.severity != "info"]


def codes(findings):
    return [d.code for d in findings if d.severity != "info"]


def lowered(*texts, **options):
    """The lowered plan of texts in which nothing is found."""
    plan, known, findings = judged(*texts, **options)
    assert [d.message for d in findings] == []
    return lower(plan, known)


def fsdp(*lines, on="dp_shard", root=True):
    """An fsdp section of some lines."""
    lines = [*lines, *(["root : unit"] if root else [])]
    return f"fsdp on {on} {{\n" + "".join(f" {line}\n" for line in lines) + "}\n"


def compiled_of(model, plan, settings=(), world=8):
    """A plan that compiles, a path or a shipped name, for a model's name or its facts."""
    sink = Sink()
    found = compile_plan(model, str(plan), sink, world_size=world, settings=settings)
    assert found.lowered is not None, [d.message for d in sink]
    return found


def simulated(model, plan, settings=("tp=2",), *, world=64, **options):
    """(verdict, findings) of layout flow for a plan that compiles."""
    found = Sink()
    return flow(compiled_of(model, plan, settings, world), found, **options), list(found)


def simulated_case(model, plan, settings=("tp=2",), *, world=4):
    """The small case of a plan on four ranks, as layout flow runs it."""
    compiled = compiled_of(model, plan, settings, world)
    return small_case(compiled, {a.name: min(a.size, 2) for a in compiled.plan.mesh.axes})


def checked(model, text, folder, **given):
    """What `planc.check` finds for a module of the test's own, by code, without notes."""
    (folder / "own.plan").write_text(text)
    found = planc.check(model, str(folder / "own.plan"), world_size=4, **given)
    return {d.code: d for d in found if d.severity != "info"}


STATED = TESTS / "stated"
"""Plans that state all layouts, as planc shipped them before it inferred layouts: what inference
finds is compared with them, and what checks say of stated layouts is tried on them."""


def flat(plan):
    """A plan that states all layouts, and those that it extends, as the text of one file, with
    columns closed up.
    """
    text = (STATED / f"{plan}.plan").read_text()
    header, _, rest = text.partition("\n")
    while found := re.search(r'^extend "(\w+)\.plan"\n', rest, re.M):
        base = (STATED / f"{found[1]}.plan").read_text().partition("\n")[2]
        rest = rest[: found.start()] + base + rest[found.end() :]
    return re.sub(" +:", " :", f"{header}\n{rest}")


def mutant(folder, plan, old, new, after=""):
    """A plan that states all layouts with one change, in a file."""
    text = flat(plan)
    head, found, rest = text.partition(after) if after else ("", "", text)
    assert old in rest, f"{plan}.plan has no {old!r}"
    path = folder / "mutant.plan"
    path.write_text(head + found + (rest.replace(old, new, 1) if after else rest.replace(old, new)))
    return path
