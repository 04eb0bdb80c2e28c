"""Writes the table in docs/library.md: every family of the shipped plans, and its largest error.

It runs each case of `test_plans.py` on four gloo processes, which takes some minutes:

    python -W ignore tests/dist/library.py
"""

import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "library.md"
HEAD = "|---|---|---|---|---|---|\n"


def lowered(model, plan, overrides):
    import numerics

    import planc

    return planc.lower(numerics.build(model), plan, world_size=4, overrides=overrides)


def attention(plan):
    """What a lowered plan does with attention, or with what a family has in its place."""
    from planc.ir.style import Colwise, Replicate, Rowwise
    from planc.lowering.ops import Parallelize

    styles = [op for op in plan.ops if isinstance(op, Parallelize)]
    ops = [op for op in styles if "att" in str(op.modules)]
    ops = ops or [op for op in styles if "mixer" in str(op.modules)]
    if not any(isinstance(op.style, Colwise | Rowwise) for op in ops):
        return "whole"
    split = [op for op in ops if isinstance(op.style, Colwise)]
    heads = any(op.style.output != Replicate() for op in split)
    return "heads" if heads else "gathered"


def share(model, plan):
    """The part of the blocks' parameters that is split."""
    import numerics

    from planc.lowering.ops import Checkpoint, Parallelize

    blocks = [op.modules for op in plan.ops if isinstance(op, Checkpoint)]
    names = tuple(f"{name}." for modules in blocks for name in modules.names())
    total = sum(
        p.numel() for n, p in numerics.build(model).named_parameters() if n.startswith(names)
    )
    split = 0
    for op in plan.ops:
        if isinstance(op, Parallelize) and any(map(op.modules.within, blocks)):
            for shape in op.shapes:
                if shape.shape != shape.local:
                    size = 1
                    for n in shape.shape:
                        size *= n
                    split += size * len(op.modules)
    return split / total


def ways(model, always):
    """The settings that `test_plans.py` runs a case with."""
    from test_plans import ALSO, settings

    for checkpointing in (True, False):
        common = {"tp": 2, "checkpointing": checkpointing, "param_dtype": "fp32"}
        if always:
            yield settings(**common)
            continue
        for sequence in (True, False):
            if model not in {m for m, _ in ALSO} or sequence == checkpointing:
                yield settings(**common, sequence_parallel=sequence)


def row(pool, model, plan, always):
    import numerics

    runs = list(ways(model, always))
    worst = 0.0
    for overrides in runs:
        for result in pool.run("numerics.compare", model=model, plan=plan, overrides=overrides):
            worst = max(worst, result["logits"], result["loss"], result["gradient"])
    low = lowered(model, plan, runs[0])
    sequence = "option" if not always else ("none" if plan in ("opt", "llama4", "gemma4", "bert", "gemma3_vision", "qwen3_vl", "qwen2_5_vl") else "always")
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
    rows = []
    for model, plan in CASES + ALSO + ALWAYS:
        rows.append(row(pool, model, plan, (model, plan) in ALWAYS))
        print(rows[-1], file=sys.stderr)
    pool.close()
    before, _, after = PAGE.read_text().partition(HEAD)
    after = after[after.index("\n\n") :]
    PAGE.write_text(before + HEAD + "\n".join(sorted(rows)) + after)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
