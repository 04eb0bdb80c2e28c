"""The numbers of `make mutants` as tables."""

from collections import Counter

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
            for table, key in ((by_family, one["family"]), (by_kind, kind)):
                table.setdefault(key, Counter())[column] += count
            total[column] += count
    for head, table in (("family", by_family), ("kind of mutant", dict(sorted(by_kind.items())))):
        print(f"| {head} | {' | '.join(COLUMNS.values())} |\n|{'---|' * (len(COLUMNS) + 1)}")
        for key, counts in (*table.items(), ("all", total)):
            print(f"| {key} | {' | '.join(str(counts[c]) for c in COLUMNS)} |")
        print()
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
