"""Writes the table in docs/generated/plans.md: every family of the shipped plans, and its error.

It runs each case of `test_plans.py` on four gloo processes, which takes some minutes:

    python -W ignore tests/plans/library.py

and only some of them, by their names in `families.py`, where they are given.
"""

import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "plans.md"
HEAD = "|---|---|---|---|---|---|\n"


def lowered(model, plan, overrides):
    import numerics

    import planc

    return planc.lower(numerics.build(model), plan, world_size=4, overrides=overrides)


def offered(model, plan):
    """Whether a plan has sequence parallelism for a model, and does without."""
    import planc
    from planc.ops.contract import output_layout
    from planc.ops.styles import Rowwise, Shard
    from planc.ops.tensor_parallel import Parallelize

    try:
        lowered(model, plan, ["tp=2", "sequence=false"])
    except planc.PlanError:
        return "always"
    ops = lowered(model, plan, ["tp=2"]).ops
    styles = [op.style for op in ops if isinstance(op, Parallelize)]
    parts = [output_layout(s) for s in styles if isinstance(s, Rowwise)]
    split = any(isinstance(layout, Shard) and layout.dim >= 0 for layout in parts)
    return "option" if split else "none"


def attention(plan):
    """What a lowered plan does with attention, or with what a family has in its place."""
    from planc.ops.styles import Colwise, Replicate, Rowwise
    from planc.ops.tensor_parallel import Parallelize

    styles = [op for op in plan.ops if isinstance(op, Parallelize)]
    ops = [op for op in styles if "att" in str(op.modules)]
    ops = ops or [op for op in styles if "mixer" in str(op.modules)]
    if not any(isinstance(op.style, Colwise | Rowwise) for op in ops):
        return "replicated"
    split = [op for op in ops if isinstance(op.style, Colwise)]
    heads = any(op.style.output != Replicate() for op in split)
    return "heads" if heads else "gathered"


def share(model, plan):
    """The part of the blocks' parameters that is split."""
    import numerics

    from planc.ops.activation_checkpoint import Checkpoint
    from planc.ops.tensor_parallel import Parallelize

    blocks = [op.modules for op in plan.ops if isinstance(op, Checkpoint)]
    names = tuple(f"{name}." for modules in blocks for name in modules.names())
    known = dict(numerics.build(model).named_parameters(remove_duplicate=False))
    inside = {id(p): p.numel() for n, p in known.items() if n.startswith(names)}
    split = {
        id(known[f"{name}.{shape.name}"])
        for op in plan.ops
        if isinstance(op, Parallelize)
        for shape in op.shapes
        if shape.shape != shape.local
        for name in op.modules.names()
    }
    return sum(n for one, n in inside.items() if one in split) / sum(inside.values())


def ways(model, always):
    """The settings that `test_plans.py` runs a case with."""
    from test_plans import ALSO, settings

    for checkpointing in (True, False):
        common = {"tp": 2, "recompute": checkpointing, "param_dtype": "fp32"}
        if always:
            yield settings(**common)
            continue
        for sequence in (True, False):
            if model not in {m for m, _ in ALSO} or sequence == checkpointing:
                yield settings(**common, sequence=sequence)


def row(pool, model, plan, always):
    import numerics

    runs = list(ways(model, always))
    worst = 0.0
    for overrides in runs:
        for result in pool.run("numerics.compare", model=model, plan=plan, overrides=overrides):
            worst = max(worst, result["logits"], result["loss"], result["gradient"])
    low = lowered(model, plan, runs[0])
    sequence = offered(model, plan)
    family = numerics.MODELS[model]["model_type"]
    kind = model.partition("-")[2]
    name = f"{family} ({kind})" if kind else family
    return (
        f"| {name} | {plan} | {attention(low)} | {share(model, low):.1%} | {sequence} "
        f"| {worst:.1e} |"
    )


def main():
    from pool import Pool
    from test_plans import ALSO, ALWAYS, CASES

    pool = Pool()
    before, _, table = PAGE.read_text().partition(HEAD)
    rows = {_name(row): row for row in table.splitlines()} if sys.argv[1:] else {}
    for model, plan in CASES + ALSO + ALWAYS:
        if not sys.argv[1:] or model in sys.argv[1:]:
            made = row(pool, model, plan, (model, plan) in ALWAYS)
            rows[_name(made)] = made
            print(made, file=sys.stderr)
    pool.close()
    PAGE.write_text(before + HEAD + "\n".join(sorted(rows.values())) + "\n")


def _name(line):
    """What a row is about: the family and the plan."""
    return tuple(cell.strip() for cell in line.split("|")[1:3])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from folders import FOLDERS

    sys.path.extend(FOLDERS)
    main()
