"""The rows of `make bench` as a record, and the page docs/generated/bench.md."""

import os
from datetime import date

from records import read_record, table, versions, write_record

HEAD = """# Benchmarks

Written by `make bench`, or for some parts by `python tests/bench/run.py PARTS`. Each row compares
planc with a reference that was measured in the same turns. Read the ratios: the numbers are those
of a machine that also does other work, with CPUs and gloo. A ratio above its limit fails the
target. Units are seconds unless the row says another. A row without a reference in its text is
compared with the import of the model's library: `from transformers import AutoModelForCausalLM`.
"""


def add_rows(part, rows):
    """Adds the rows of a part to the record, and writes the page.

    Args:
        rows: (what was compared, planc's number, the reference's, the largest ratio wanted).
    """
    where = f"{os.cpu_count()} cores, {versions()}"
    measured = {"date": date.today().isoformat(), "where": where, "rows": rows}
    record = {**read_record("bench"), part: measured}
    write_record("bench", record, page(record))


def page(record):
    """The page of a record."""
    text = HEAD
    for part, measured in sorted(record.items()):
        rows = [
            [what, digits(mine), digits(reference), f"{mine / reference:.3f}", limit]
            for what, mine, reference, limit in measured["rows"]
        ]
        text += f"\n## {part}\n\n{measured['date']}, {measured['where']}\n\n"
        text += table(["what", "planc", "reference", "ratio", "limit"], rows)
    return text


def digits(number):
    """A number with three digits, such as 0.0123, 1.23 or 1,230."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
