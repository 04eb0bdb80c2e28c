"""The part of a step's global batch that each data rank reads, on any number of ranks."""

from dataclasses import dataclass

from planc.diagnostics.diagnostic import one_of
from planc.ops.lowered import Lowered
from planc.runtime.preconditions import stop
from planc.runtime.script_line import script_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """The rows of a step that one data rank reads, for `run.forward_backward`.

    Args:
        global_batch: the rows of a step, of all ranks.
        passes: the number of batches of a step, equal on all ranks.
        parts: the rows of each batch of this rank, as places in the global batch. Where the data
            ranks do not divide it, a rank may have one batch less than there are passes.
    """

    global_batch: int
    passes: int
    parts: tuple[range, ...]

    def batches(self, step: int) -> list[range]:
        """The rows of each batch of this rank in a step, as numbers of a data set that is read in
        order: the same rows of all ranks together, however many ranks there are.
        """
        first = step * self.global_batch
        return [range(first + part.start, first + part.stop) for part in self.parts]


def accumulation(
    lowered: Lowered, global_batch: int, rows: int | None, data_rank: int
) -> Accumulation:
    """The rows of a data rank; arguments and errors are those of `Run.accumulation`."""
    for name, value in (("global_batch", global_batch), ("rows", rows)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"`{name}` is a positive number of rows, not {value!r}")
    ranks = lowered.axis_size(*lowered.data)
    unit = lowered.pipeline.microbatches if lowered.pipeline else 1
    whole, over = divmod(global_batch // unit, ranks)
    if global_batch % unit or not whole:
        raise _spread_error(global_batch, unit, ranks)
    passes = -(-(whole + (over > 0)) // (rows or global_batch))
    local_units = whole + (data_rank < over)
    first = whole * data_rank + min(data_rank, over)
    count = min(passes, local_units)
    ends = [unit * (first + local_units * at // count) for at in range(count + 1)]
    parts = tuple(map(range, ends[:-1], ends[1:]))
    return Accumulation(global_batch=global_batch, passes=passes, parts=parts)


def _spread_error(rows: int, unit: int, ranks: int) -> Exception:
    cut = f" of {unit} microbatches" if unit > 1 else ""
    each = f"{unit} rows" if unit > 1 else "one row"
    near = sorted({max(ranks, at) * unit for at in (rows // unit, rows // unit + 1)})
    return stop(
        "PL619",
        f"{rows} rows of a step cannot be spread over {ranks} data ranks{cut}",
        *script_line("the global batch is given here"),
        help=f"each data rank takes {each} or a multiple: use {one_of(map(str, near))}, or another "
        "mesh",
    )
