"""`make coverage`: every causal-LM family of transformers: init -> check -> four real processes.

For each model type: a plan (the one that planc ships, else what `planc init` writes), what layout
flow says of it, and the errors of logits, loss, gradients and parameters after two steps on four
gloo processes (tp 2, dp_shard 2, checkpointing), with sequence parallelism too where the plan
offers it; whether these had padding and labels that are ignored unevenly over the data ranks; and
the same with the family's own dropout.
Rows are kept in build/coverage as they come, so a run that was stopped goes on where it was; a row
that lacks a column is made again.
"""

import argparse
import json
import re
import signal
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from folders import FOLDERS

sys.path.extend(FOLDERS)

from pool import Pool, RankError
from rich.progress import track

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.files.resources import PLANS
from planc.model.config_fields import DROPOUT
from planc.model.facts import Facts, Modules
from planc.model.layer_kinds import block_lists
from planc.model.load import load_values
from planc.model.sources.default_configs import default_config
from planc.ops.document import dumps
from planc.ops.tensor_parallel import Parallelize
from planc.proof.layout_flow import flow
from planc.proof.small_case import small_model
from planc.syntax import plan_files
from planc.tools.init.init import draft

ROOT = Path(__file__).parent.parent.parent
LIMIT = 1e-4
WORLD = 4
SECONDS = 300


def types():
    """Every causal-LM model type of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return sorted(names)


def shipped(folder=PLANS):
    """The plan of each model type that has one among those that ship."""
    found = {}
    for path in sorted(folder.glob("*.plan")):
        header = next(x for x in path.read_text().splitlines() if x.startswith("plan "))
        for name in header.partition(" for ")[2].split(","):
            found[name.strip()] = path.stem
    return found


class Late(Exception):
    """A family took too long."""


@dataclass
class Case:
    """A family's default model, its small sibling, and the plan for both."""

    facts: Facts
    small: Facts
    values: dict
    plan: str


def row(name, pool, folder, plans):
    """What is found of one model type.

    Args:
        name: the model type.
        pool: four processes.
        folder: where a plan is written.
        plans: shipped plans by model type.
    """
    found = {"type": name, "source": "init", "verdict": "", "reason": ""}
    sink = Sink()
    try:
        facts, values, small = models(name, sink)
    except Exception as error:  # a default configuration that transformers itself refuses
        return {**found, "reason": f"can't be built: {type(error).__name__}: {error}"}
    if small is None:
        return {**found, "reason": f"can't be built{' small' * bool(facts)}: {first(sink)}"}
    path = folder / f"{name}.plan"
    family = facts.family if facts.family in plans else name  # its language model alone, say
    if family in plans:
        found["source"], found["plan"] = "shipped", plans[family]
        path = PLANS / f"{plans[family]}.plan"
    else:
        made = draft(facts, sink)
        found["runs"] = made.runs
        path.write_text(made.text)
    case = Case(facts, small, values, str(path))
    text = text_of(plan_files.read(case.plan, sink))
    tp = ["tp=2"] if re.search(r"^ +(override )?tp +=", text, re.M) else []
    sequence = re.search(r"\bwhen sequence\b|\bsequence = sequence\b", text) is not None
    always = "\nrequire sequence" in text
    plain = ["sequence=false"] if sequence and not always else []
    reason = judged(found, case, [*tp, *plain], pool)
    if plain and "PL525" in reason:  # the model's code has no way without
        plain = ["sequence=true"]
        reason = judged(found, case, [*tp, *plain], pool)
        found["errorssp"] = found.get("errors")
    elif not reason and sequence and not always:
        reason = judged(found, case, [*tp, "sequence=true"], pool, "sp")
        if any(code in reason for code in ("PL110", "PL524", "PL526")):
            reason = ""  # the plan, or the model's code, has none
    if not reason:
        reason = trained(found, case, [*tp, *plain], pool)
    return {**found, "reason": reason, **({"verdict": ""} if reason else {})}


def text_of(files):
    """The text of a plan and of those that it extends."""
    return "".join(file.origin.source.text for file in files)


def models(name, sink):
    """A family's default model, the small configuration, and the small model; or None each."""
    facts = load_values(default_config(name), name, sink)
    if facts is None:
        return None, None, None
    small = small_model(facts)
    return facts, small.values, small.facts(facts, sink)


def judged(found, case, settings, pool, mark=""):
    """Fills the row for one way; gives what is wrong, or nothing.

    `planc check` judges the plan for the family's own sizes; the processes run the small model.
    """
    sink = Sink()
    settings = [*settings, "param_dtype=fp32"]
    compiled = compile_plan(case.facts, case.plan, sink, world_size=WORLD, settings=settings)
    if compiled.lowered is None:
        return f"planc check: {first(sink)} {sorted({d.code for d in sink})}"
    found[f"flow{mark}"] = flow(compiled, sink).verdict
    if not mark:
        found |= splits(compiled)
    small = compile_plan(case.small, case.plan, sink, world_size=WORLD, settings=settings)
    if small.lowered is None:
        return f"the small model: {first(sink)}"
    try:
        results = pool.run(
            "coverage_jobs.prove", values=case.values, document=dumps(small.lowered), timeout=120
        )
    except RankError as error:
        return f"processes: {str(error).strip().splitlines()[-1][:200]}"
    worst = {k: max(r[k] for r in results) for k in ("logits", "loss", "gradient", "parameters")}
    found[f"errors{mark}"] = worst
    found[f"worst{mark}"] = results[0]["worst"]
    found["inputs"] = {k: results[0][k] for k in ("padding", "uneven")}
    if not max(worst["logits"], worst["loss"], worst["gradient"]) < LIMIT:
        return f"wrong{' with sequence parallelism' if mark else ''}: {worst}"
    found["verdict"] = "proved"
    return ""


def trained(found, case, settings, pool):
    """Fills in `training`, what is seen with the family's own dropout; gives what is wrong.

    `yes`: all numbers are those of one process that draws as the ranks do; `not compared`: it
    trains, and some ranks draw what one process can't, which is no error; `no dropout`.
    """
    found["training"] = "no dropout"
    values = drawing(case.facts.config, case.values)
    if values == case.values:
        return ""
    sink = Sink()
    small = load_values(values, found["type"], sink)
    done = small and compile_plan(
        small, case.plan, sink, world_size=WORLD, settings=[*settings, "param_dtype=fp32"]
    )
    if not done or done.lowered is None:
        return f"the small model with dropout: {first(sink)}"
    try:
        results = pool.run(
            "coverage_jobs.prove", values=values, document=dumps(done.lowered), timeout=120
        )
    except RankError as error:
        return f"with dropout: {str(error).strip().splitlines()[-1][:200]}"
    worst = max(max(r["logits"], r["loss"], r["gradient"]) for r in results)
    found["training"] = "yes" if worst < LIMIT else "not compared"
    return "" if isfinite(worst) else f"with dropout: {results[0]['worst']} is not finite"


def drawing(config, small):
    """The small configuration with the dropout of the family's own; layers are not skipped.

    Args:
        config: the family's default configuration.
        small: the small one, in which nothing is drawn.
    """
    made = dict(small)
    for name, value in small.items():
        own = config.get(name)
        if isinstance(value, dict) and isinstance(own, dict):
            made[name] = drawing(own, value)
        elif (
            DROPOUT.search(name) and name not in NEVER and isinstance(own, int | float) and own > 0
        ):
            made[name] = own
    return made


NEVER = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "summary_first_dropout")


def splits(compiled):
    """What tensor parallelism splits of the blocks.

    Returns:
        `share`, the part of their parameters; `kept`, the modules that hold most of the rest, with
        their parts; and for a mixture of experts `experts`: the part of the experts' parameters
        that is split, and the styles that do so.
    """
    lists = list(block_lists(compiled.facts.model))
    total = sum(m.module.count for m in lists) or 1
    parted = [op for op in compiled.lowered.ops if isinstance(op, Parallelize) and size(op)]
    rest = Counter()
    for at in lists:
        for found in leaves(at):
            count = sum(p.numel for p in found.module.parameters) * len(found)
            count -= sum(size(op) for op in parted if found.is_within(op.modules))
            rest[f"{found.path[-1]} ({found.module.cls})"] += max(count, 0)
    split = sum(size(op) for op in parted if any(op.modules.is_within(m) for m in lists))
    found = {"share": split / total}
    found["kept"] = [[n, c / total] for n, c in rest.most_common(4) if c > 0.02 * total]
    held = [m for at in lists for m in of_experts(at)]
    if count := sum(m.module.count * len(m) for m in held):
        inside = [op for op in parted if any(op.modules.is_within(m) for m in held)]
        styles = sorted({type(op.style).__name__.lower() for op in inside})
        found["experts"] = {"share": sum(size(op) for op in inside) / count, "styles": styles}
    return found


def size(op):
    """How many numbers an operation splits, on all its modules."""
    return sum(prod(s.shape) for s in op.shapes if s.shape != s.local) * len(op.modules)


def leaves(at):
    """A set of modules and all below it."""
    yield at
    for child in at.module.children:
        yield from leaves(Modules((*at.path, child.segment), child.module))


def of_experts(at):
    """The outermost modules that hold routed experts, below `at`."""
    for child in at.module.children:
        below = Modules((*at.path, child.segment), child.module)
        if re.search(
            r"(?<!shared_)experts?$|(?<!Shared)Experts?$", f"{child.name} {child.module.cls}"
        ):
            yield below
        else:
            yield from of_experts(below)


def first(sink):
    errors = [d.message for d in sink if d.severity == "error"]
    return errors[0] if errors else "no reason"


def guarded(name, pool, folder, plans):
    def late(*_):
        raise Late(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return row(name, pool, folder, plans)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        text = (str(error).strip().splitlines() or [""])[0][:200]
        return {
            "type": name,
            "source": "init",
            "verdict": "",
            "reason": f"{type(error).__name__}: {text} ({where})",
        }
    finally:
        signal.alarm(0)


def settled(kept, failed):
    """Whether a row needs no other run: a proved one that has all columns, or one that is not.

    Args:
        kept: the file of the row.
        failed: whether what is not proved is run again.
    """
    row = json.loads(kept.read_text())
    return "training" in row if row["verdict"] == "proved" else not failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--again", action="store_true", help="also what was done before")
    parser.add_argument("--failed", action="store_true", help="again what was not proved")
    parser.add_argument("--init", action="store_true", help="planc init even where a plan ships")
    parser.add_argument("--part", default="0/1", help="of several runs side by side: 0/2, 1/2")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "coverage")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    plans = {} if options.init else shipped()
    own, _, many = options.part.partition("/")
    pool = Pool()
    wanted = (options.types or types())[int(own) :: int(many)]
    for name in track(wanted, "families"):
        kept = options.folder / f"{name}.json"
        if kept.exists() and not options.again and settled(kept, options.failed):
            continue
        if not pool.alive:
            pool = Pool()
        found = guarded(name, pool, options.folder, plans)
        kept.write_text(json.dumps(found, indent=1))
        print(json.dumps(found), flush=True)
    pool.close()


if __name__ == "__main__":
    sys.exit(main())
