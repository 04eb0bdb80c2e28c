"""`schedule = file("x.csv")` -> the passes of each rank, checked.

The format is that of `torch.distributed.pipelining` (`_PipelineScheduleRuntime._load_csv`): a row
for each rank, and in it `2F0` for the forward of microbatch 0 on stage 2, `B` for the backward, `I`
and `W` for its halves. Sends, receives and gathers may be in it; torch derives them anew.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from planc.ops.pipeline import OF_FILES, stages_of_rank

_ACTION = re.compile(r"(\d{1,6})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,6})")
_OF_FSDP = re.compile(r"\d{1,6}(UNSHARD|RESHARD|REDUCE_GRAD)")
Action = tuple[int, str, int]
"""A stage, a letter, and a microbatch."""


class ScheduleFileError(Exception):
    """A mistake in a schedule file."""


def read_schedule(
    text: str, *, ranks: int, stages: int, microbatches: int
) -> tuple[str, tuple[str, ...]]:
    """The schedule's name and the passes of each rank, in order.

    Args:
        text: of the file.
        ranks, stages, microbatches: what the plan says of the pipeline.

    Raises:
        ScheduleFileError: a pass is missing, repeated or too early, a send has no receive, or the
            ranks hold stages neither in turn nor there and back.
    """
    import csv  # few plans name a file

    rows = [list(_actions(i, row)) for i, row in enumerate(csv.reader(text.splitlines()))]
    while rows and not rows[-1]:
        rows.pop()
    if len(rows) != ranks:
        raise ScheduleFileError(f"it has {len(rows)} rows, and the axis {ranks} ranks")
    _messages(rows, stages)
    passes = [[a for a in row if len(a[1]) == 1] for row in rows]
    _once(passes, stages, microbatches)
    name = _placement(passes, ranks, stages)
    _runs(passes, stages)
    return name, tuple(",".join(f"{s}{kind}{m}" for s, kind, m in row) for row in passes)


def _actions(number: int, cells: Iterable[str]) -> Iterator[Action]:
    for place, cell in enumerate(map(str.strip, cells), 1):
        if action := _ACTION.fullmatch(cell):
            yield int(action[1]), action[2], int(action[3])
        elif cell and not _OF_FSDP.fullmatch(cell):
            # the file may be any other, so its text is not quoted
            where = f"entry {place} of row {number + 1}"
            raise ScheduleFileError(f"{where} is no pass, such as 0F0, 0B0, 0I0 or 0W0")


def _messages(rows: Sequence[Sequence[Action]], stages: int) -> None:
    """Every send of a file that has some is received, once, on the stage that it is for."""
    counts = Counter(action for row in rows for action in row if len(action[1]) > 1)
    for (stage, kind, micro), count in counts.items():
        back, to = kind[-1], kind.startswith("SEND")
        peer = stage + (1 if (back == "F") == to else -1)
        other = f"{'RECV' if to else 'SEND'}_{back}"
        if not 0 <= peer < stages or counts[peer, other, micro] != count:
            raise ScheduleFileError(f"{stage}{kind}{micro} has no {peer}{other}{micro}")


def _once(rows: Sequence[Sequence[Action]], stages: int, microbatches: int) -> None:
    """Each stage runs forward and backward once for each microbatch, and nothing else."""
    counts = Counter(action for row in rows for action in row)
    wanted: dict[Action, None] = {}
    for stage in range(stages):
        for micro in range(microbatches):
            halves = (stage, "B", micro) not in counts and (stage, "I", micro) in counts
            wanted |= {(stage, kind, micro): None for kind in ("FIW" if halves else "FB")}
    for action in (*wanted, *counts):
        stage, kind, micro = action
        if counts[action] == 1 and action in wanted:
            continue
        count = f"{counts[action]} times" if counts[action] else "never"
        why = "" if action in wanted else ", and the plan has no such pass"
        raise ScheduleFileError(f"{stage}{kind}{micro} runs {count}{why}")


def _placement(rows: Sequence[Sequence[Action]], ranks: int, stages: int) -> str:
    held = [{stage for stage, _, _ in row} for row in rows]
    for name in OF_FILES:
        stages_by_rank = [{*stages_of_rank(name, rank, ranks, stages)} for rank in range(ranks)]
        if held == stages_by_rank:
            return name
    shown = ", ".join(str(sorted(stages_by_rank)) for stages_by_rank in held[:8])
    raise ScheduleFileError(
        f"its ranks have the stages {shown}: neither in turn nor there and back"
    )


def _runs(rows: Sequence[Sequence[Action]], stages: int) -> None:
    """Each pass comes after those that it needs, and no rank waits forever.

    The last stage's forward passes are in order: torch keeps losses so (`_internal_losses`).
    """
    last = [
        micro for row in rows for stage, kind, micro in row if (stage, kind) == (stages - 1, "F")
    ]
    for micro, next_one in pairwise(last):
        if next_one < micro:
            text = f"{stages - 1}F{micro} is before {stages - 1}F{next_one}"
            raise ScheduleFileError(f"{text}, and the last stage takes microbatches in order")
    done: set[Action] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and _ready(row[at[rank]], stages, done):
                done.add(row[at[rank]])
                at[rank] += 1
                moved = True
    for rank, row in enumerate(rows):
        if at[rank] < len(row):
            stage, kind, micro = row[at[rank]]
            raise ScheduleFileError(f"{stage}{kind}{micro} of rank {rank} waits forever")


def _ready(action: Action, stages: int, done: set[Action]) -> bool:
    stage, kind, micro = action
    if kind == "F":
        return stage == 0 or (stage - 1, "F", micro) in done
    if kind == "W":
        return (stage, "I", micro) in done
    later = stage == stages - 1 or {(stage + 1, "B", micro), (stage + 1, "I", micro)} & done
    return (stage, "F", micro) in done and bool(later)
