"""The numbers of `make mutants` as tables, and the page docs/generated/mutants.md."""

from collections import Counter

from records import read_record, table, versions, write_record

COLUMNS = {
    "refuted": "bad, refuted",
    "unsure": "bad, unknown",
    "silent": "**bad, accepted**",
    "accepted": "right, accepted",
    "open": "right, unknown",
    "alarm": "**right, refuted**",
    "contradictory": "contradictory",
    "not elaborated": "not elaborated",
}
"""What a mutant is (by four processes), and what check says of it."""


def category(real, said):
    """The column of a mutant."""
    if real == "not elaborated":
        return real
    right = {"refuted": "alarm", "unknown": "open", "passed": "accepted"}
    bad = {"refuted": "refuted", "unknown": "unsure", "passed": "silent"}
    right, bad = right | {"contradictory": "contradictory"}, bad | {"contradictory": "refuted"}
    return (right if real == "right" else bad)[said]


def show(found):
    """Prints the tables of some families; returns whether any plan was judged wrongly."""
    by_family, by_kind, total, unchanged = {}, {}, Counter(), 0
    for one in found:
        for kind, real, said, count in one["counts"]:
            column = category(real, said)
            if kind == "unchanged":
                unchanged += count * (column != "accepted")
                continue
            for counts, key in ((by_family, one["family"]), (by_kind, kind)):
                counts.setdefault(key, Counter())[column] += count
            total[column] += count
    for head, lines in (("family", by_family), ("kind of mutant", dict(sorted(by_kind.items())))):
        rows = [[key, *(n[c] for c in COLUMNS)] for key, n in (*lines.items(), ("all", total))]
        print(table([head, *COLUMNS.values()], rows))
    seconds = sum(one["seconds"] for one in found)
    print(f"{len(found)} families in {seconds / 60:.0f} minutes: {summary(total)}")
    if unchanged:
        print(f"{unchanged} plans are not right or not accepted as they are shipped")
    return bool(total["silent"] or total["alarm"] or unchanged)


def summary(total):
    bad = total["refuted"] + total["unsure"] + total["silent"]
    right = total["accepted"] + total["open"] + total["alarm"]
    return (
        f"{total['refuted']} of {bad} bad mutants refuted, {total['unsure']} unknown, "
        f"{total['silent']} accepted in silence; of {right} that train the same model "
        f"{total['alarm']} refuted, {total['open']} unknown"
    )


KINDS = {
    "rule dropped, rule retargeted": "a line is missing, or its selector matches other modules",
    "style, layout, local": "another style, another layout, or a local output",
    "experts": "experts that are sharded on another dim, or not as fused",
    "layers": "a changed rule for some layers (`[0:2]`, `[-1]`, `[::2]`), at twice the depth",
    "degree": "a changed rule under a condition on the mesh or on a size, such as `when tp >= 4`",
    "condition": "an inverted condition",
    "unit dropped, unit": "FSDP units that are missing, split, joined, or resharded differently",
    "checkpoint": "other activation checkpoints",
    "reduce dtype, divide": "gradients that are reduced in 16 bits, or divided by another number",
    "ignore, frozen": "modules that FSDP ignores, frozen or not, or that are only frozen",
}
HEAD = """# Broken plans

Written by `make mutants`. It changes one thing in a shipped plan at a time, asks `planc check`, and
trains with the mutant on four processes to find the truth. Many mutants are equivalent: a dropped
FSDP unit, for example, changes only memory. A bad mutant trains another model.

%s
The truth is two steps with two accumulated passes: one with padding and unevenly ignored labels,
one with packed documents. Logits, losses, norms, every gradient and every parameter are compared.
It uses nothing of the program by which `planc check` decides. Mutants that lower to the operations
of an earlier one are left out. In plans that reduce in 16 bits, the comparison leaves out at most
one token in twenty, because rounding sends tokens with nearly tied experts to other experts.

"""
"""The page's text before the samples."""


def add_sample(found, most, seed):
    """Adds the numbers of a run to the record, and writes the page.

    A run of the same families, number of mutants and seed replaces the earlier one.

    Args:
        found: the documents of the families.
        most: the number of mutants of each family, or 0 for all.
        seed: the seed that chose them.
    """
    counts = Counter()
    for family in found:
        for kind, real, said, count in family["counts"]:
            if kind != "unchanged":
                counts[category(real, said)] += count
    families = "; ".join(family["family"] for family in found)
    sample = {"families": families, "most": most, "seed": seed, "versions": versions()}
    key = ("families", "most", "seed")
    earlier = read_record("mutants").get("samples", [])
    others = [one for one in earlier if any(one[name] != sample[name] for name in key)]
    complete = {column: counts[column] for column in COLUMNS}
    record = {"samples": [*others, {**sample, "counts": complete}]}
    write_record("mutants", record, page(record))


def page(record):
    """The page of the samples."""
    heads = ["families", "each", "versions", *COLUMNS.values()]
    rows = [
        [one["families"], one["most"] or "all", one["versions"]]
        + [one["counts"].get(column, "") for column in COLUMNS]
        for one in record["samples"]
    ]
    return HEAD % table(["kind", "change"], KINDS.items()) + table(heads, rows)
