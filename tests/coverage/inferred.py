"""Infers layouts from the splits of each family's plan, and compares, or has them proved.

For each model type: the rules of a plan (one of tests/stated, else what `planc init` drafts)
without anything that travels, the layouts that `planc.infer.infer_layouts` adds, without and with
sequence parallelism, what differs from the operations that the plan states, bytes sent, and the
verdict of layout flow. Rows are kept as they come, so a run that was stopped goes on where it was.

    python tests/coverage/inferred.py OUT.jsonl [NAME[=PLAN] ...] [--prove] [--trace]

A name is a model type, or `family:` and a small model of tests/support/families.py.
"""

import argparse
import json
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from folders import FOLDERS

sys.path.extend(FOLDERS)

import families
import family_rows as coverage
from helpers import STATED

from planc import compiler
from planc.checks import check
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import NOWHERE
from planc.infer.apply_adapters import adapt_plan
from planc.infer.infer_layouts import infer_layouts
from planc.ir.nodes import SequenceSetting
from planc.lowering import lower
from planc.lowering.collectives import step_collectives
from planc.lowering.step import Step
from planc.model.load import load_values
from planc.ops import styles as st
from planc.ops.styles import style_text
from planc.ops.tensor_parallel import Parallelize
from planc.proof.judge import judge
from planc.proof.small_case import SmallCase, small_model
from planc.tools.init.init import draft
from planc.tools.init.plan_text import parsed_text

WAYS = (("plain", False), ("sequence", True))


def split(rule):
    """A rule as a plan of splits states it; None for what travels."""
    style = rule.style
    match style:
        case st.Colwise():
            whole = isinstance(style.output, st.Replicate)
            output = st.Replicate() if whole else st.Shard(-1)
            style = replace(style, input=st.Replicate(), output=output, local=True)
        case st.Rowwise():
            embedding = rule.modules.module.kind == "embedding"
            source = st.Replicate() if embedding else st.Shard(-1)
            style = replace(style, input=source, output=st.Replicate(), local=True)
        case st.Experts():
            style = st.Experts(layouts=style.layouts)
        case st.Parameters():
            kept = [(n, one) for n, one in style.layouts if one.layout != st.Replicate()]
            if not kept:
                return None
            style = st.Parameters(layouts=tuple(kept))
        case st.Attributes() | st.Features():
            pass
        case _:
            return None
    return replace(rule, style=style, open=True)


def splits_of(plan, *, sequence, axis="tp"):
    """A plan's splits over an axis, with the setting `sequence`."""
    rules = [split(r) if r.axis == axis else r for r in plan.tensor]
    setting = SequenceSetting(axis=axis, wanted=sequence, origin=NOWHERE)
    return replace(plan, tensor=tuple(r for r in rules if r), sequence=(setting,))


def styles(lowered):
    """The styles of each module, by its name."""
    found = {}
    for op in lowered.ops:
        if isinstance(op, Parallelize):
            for name in op.modules.names():
                found.setdefault(name, set()).add(style_text(op.style))
    return found


ONCE = re.compile(
    r"input\((\w+ = )?(null, )*replicate -> replicate(, (\w+ = )?replicate -> replicate)*\)"
)
"""One sum of an input's gradient, which the shipped plans did not have."""


def different(mine, theirs):
    """What differs, by generic names."""
    found = {}
    for name in {**mine, **theirs}:
        own = {s for s in mine.get(name, ()) if not ONCE.fullmatch(s)}
        other = theirs.get(name, set())
        if own != other:
            key = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
            found[key] = [sorted(own - other), sorted(other - own)]
    return found


def sent(lowered, facts):
    """The bytes of a step over tensor axes; an all-reduce sends its own twice."""
    step = Step(lowered=lowered, config=facts.config, batch=4, sequence=16, computes="float32")
    return sum(
        one.times * one.size * (2 if one.kind == "all-reduce" else 1)
        for one in step_collectives(step)
        if one.word == "tensor" and one.size
    )


def plan_of(compiled, facts, sequence):
    """The plan with inferred layouts, lowered; or the findings."""
    sink = Sink()
    made = infer_layouts(splits_of(compiled.plan, sequence=sequence), facts, sink)
    if sink.errors:
        return None, [f"{d.code} {d.message} {list(d.facts)}" for d in sink]
    applied = adapt_plan(made, facts)
    check(*applied, sink)
    lowered = lower(*applied)
    errors = [f"{d.code} {d.message}" for d in sink if d.severity == "error"]
    return replace(compiled, plan=made, applied=applied, lowered=lowered), errors


def compiled_for(facts, plan, sequence):
    """The shipped plan, with sequence parallelism or without, and whether it is so; the plan is
    None where nothing is lowered.
    """
    settings = ["tp=2", "dp_shard=1", f"sequence={str(sequence).lower()}"]
    for some in (settings, settings[:2]):
        done = compile_plan(facts, plan, Sink(), world_size=2, settings=some)
        if done.lowered is not None:
            every = [s for some in styles(done.lowered).values() for s in some]
            ours = any(
                s == "sequence" or (s.startswith("rowwise") and "-> shard" in s) for s in every
            )
            return done, ours == sequence
    return None, False


def row(name, plan, prove):
    """What is found of one model type: a plan's operations beside inferred ones, in each way."""
    found = {"family": name, "plan": plan or "init"}
    sink = Sink()
    if name.startswith("family:"):
        facts = load_values(families.FAMILIES[name.partition(":")[2]], name, sink)
        small = facts
    else:
        facts, _, small = coverage.models(name, sink)
    if small is None:
        return {**found, "error": "can't be built"}
    for key, sequence in WAYS:
        if plan:
            base, same_way = compiled_for(small, plan, sequence)
        else:
            base, same_way = drafted(facts, small), not sequence
        if base is None:
            return {**found, "error": "no splits"}
        start = time.time()
        made, errors = plan_of(base, small, sequence)
        one = found[key] = {"seconds": round(time.time() - start, 2), "errors": errors}
        if made is None:
            continue
        one["parts"] = [s.parts for s in made.plan.sequence]
        if same_way:
            one["diff"] = different(styles(made.lowered), styles(base.lowered))
            one["bytes"] = [sent(done.lowered, small) for done in (made, base)]
        if prove:
            outcome = judge(SmallCase(model=small_model(facts), compiled=made), quick=True)
            one["verdict"] = outcome.verdict
            if outcome.verdict != "proved":
                one["reason"] = outcome.reason
                one["first"] = [f"{d.kind} {d.subject} {d.detail}" for d in outcome.discrepancies][
                    :3
                ]
    return found


def drafted(facts, small):
    """The plain rules of `planc init` for a family without a shipped plan."""
    files = parsed_text(draft(facts, Sink()).text)
    settings = ["tp=2", "dp_shard=1"]
    for way in (["sequence=false"], []):
        done = compiler.compile(files, small, Sink(), world_size=2, settings=[*settings, *way])
        if done.lowered is not None:
            return done
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    done = set()
    if options.out.exists():
        done = {json.loads(line)["family"] for line in options.out.open()}
    named = coverage.shipped(STATED)
    plans = {family: str(STATED / f"{plan}.plan") for family, plan in named.items()}

    def late(*_):
        raise coverage.Late

    signal.signal(signal.SIGALRM, late)
    for text in options.names or coverage.types():
        name, _, plan = text.partition("=")
        if name in done:
            continue
        signal.alarm(coverage.SECONDS)
        try:
            found = row(name, plan or plans.get(name), options.prove)
        except coverage.Late:
            found = {"family": name, "error": "late"}
        except Exception as error:
            if options.trace:
                raise
            found = {"family": name, "error": f"{type(error).__name__}: {error}"[:300]}
        signal.alarm(0)
        with options.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        show(found)


def show(found):
    """One row for a person."""
    print(found["family"], found.get("plan", ""), found.get("error", ""))
    for key, _ in WAYS:
        one = found.get(key)
        if one:
            diff = one.get("diff")
            same = "" if diff is None else "same" if not diff else f"{len(diff)} differ"
            print(
                f"  {key:9} {same} {one.get('bytes', '')} {one.get('verdict', '')}", one["seconds"]
            )
            for text in one["errors"][:3]:
                print("     !", text[:400])
            for text in one.get("first", [])[:2]:
                print("     x", text[:300])
            for name, (own, other) in list((diff or {}).items())[:6]:
                print(f"     {name}: {own} for {other}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
