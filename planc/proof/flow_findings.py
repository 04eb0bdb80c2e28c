"""Reports the discrepancies of layout flow at the plan's lines, with the model's source line."""

import re
from collections.abc import Callable, Iterable, Set

from planc.checks.parameters import TiedStyles
from planc.diagnostics.codes import TIES
from planc.diagnostics.diagnostic import Diagnostic, Label, Severity, Sink, one_of
from planc.ir.nodes import Mesh, Plan
from planc.model.facts import below, generic
from planc.ops.base import AxisRole
from planc.ops.optimizer import OptimizerClass
from planc.ops.phrases import together
from planc.ops.styles import Sequence
from planc.proof.responsible_rules import rule_labels, unit_labels
from planc.simulate.outcome import LOSS_ALONE, Discrepancy, Outcome

_SEEN = "seen on a proxy model, with all ranks simulated"
_OF_PARAMETERS = ("gradient", "partial", "missing", "norm", "parameter")
_MOST = 8
"""The most findings of one kind."""


def refutation_findings(
    outcome: Outcome, small: Plan, ties: Iterable[TiedStyles], sink: Sink
) -> tuple[Diagnostic, ...]:
    """The findings of what differs: outputs (PL501), crashes (PL503), gradients (PL502), sizes
    (PL507), parts of sequences (PL541), the norm or the parameters after two steps (PL509), random
    numbers (PL511), and parameters that only some data ranks use (PL512).

    Only the first wrong output is reported, because the outputs after it differ as a consequence,
    as all of them do of random numbers that differ, and of one cause only one finding: an input
    with another layout than the plan states (PL505), or tied parameters of which one is replicated.
    The latter overrules PL401 in the sink, which says the same from structure alone.
    """
    reported = Sink()
    groups = _groups(outcome, small)
    if uneven := outcome.of_kind("uneven"):
        _uneven(uneven, small, reported)
    first = [g for g in groups if g[0].kind in ("output", "crash", "context")][:1]
    sizes = [g for g in groups if g[0].kind == "size"][:1]
    gradients = [g for g in groups if g[0].kind in _OF_PARAMETERS]
    boundaries = [g for g in groups if g[0].kind == "boundary"]
    draws = [g for g in groups if g[0].kind == "draws"][:1]
    found = (*sizes, *(draws or first or gradients[:_MOST]))
    causes = [b for b in boundaries if any(_module(b) == _module(g) for g in found)]
    said: list[object] = []
    for group in found:
        cause = next((b for b in causes if _module(b) == _module(group)), None)
        tie = next((t for t in ties if _of_replicated(t, group)), None)
        if (cause or tie) in said:
            continue
        if cause is not None:
            _boundary(cause, small, reported, Severity.ERROR, _consequence(group[0]))
        elif tie is not None:
            _report_tie(tie, group, reported)
            sink.overrule(TIES)
        else:
            _REPORTERS.get(group[0].kind, _gradient)(group, small, reported)
            continue
        said.append(cause or tie)
    for group in [] if causes else boundaries[:1]:
        _boundary(group, small, reported, Severity.ERROR)
    return reported.diagnostics


def report_limits(outcome: Outcome, mesh: Mesh, sink: Sink) -> None:
    """Reports for which losses and lengths the numbers are others than the single process's."""
    _coupled_microbatches(outcome, mesh, sink)
    _means(outcome, mesh, sink)
    _row_buffers(outcome, mesh, sink)
    _lengths(outcome, mesh, sink)


def _means(outcome: Outcome, mesh: Mesh, sink: Sink) -> None:
    """Reports a module that mixes the rows of a batch (PL513), or a loss whose mean over the data
    ranks is not that of the whole batch (PL510), at the axes whose ranks read rows of their own.
    """
    axes = [axis for axis in mesh.of_role(AxisRole.DATA) if axis.size > 1]
    labels = [axis.label for axis in axes]
    for mismatch in outcome.of_kind("rows"):
        sink.warning(
            "PL513",
            f"the output of {_where(mismatch)} for a row depends on the other rows "
            "of the batch: each data rank computes it from its own rows alone",
            *labels,
            facts=[_of_the_whole_batch(mismatch), _SEEN],
            help="every data-parallel trainer computes this; `nn.SyncBatchNorm` takes the "
            'statistics of all rows; if it is meant, say `ignore = ["PL513"]` in '
            "`[tool.planc]` of pyproject.toml",
        )
    for mismatch in outcome.of_kind("mean"):
        sink.warning(
            "PL510",
            "the loss of the whole batch is not the mean over the data ranks: each rank's part "
            "of it is computed on its own rows",
            *labels,
            facts=[_of_the_whole_batch(mismatch), _SEEN],
            help="gradient accumulation in one process computes the same as the data ranks "
            "do; the usual causes are a router's auxiliary loss, and one over pairs of rows",
        )


def _row_buffers(outcome: Outcome, mesh: Mesh, sink: Sink) -> None:
    """Reports buffers that the forward pass computes from rows (PL385)."""
    labels = [axis.label for axis in mesh.of_role(AxisRole.DATA) if axis.size > 1]
    buffers = together(dict.fromkeys(generic(d.subject) for d in outcome.of_kind("buffer")))
    if buffers:
        names = ", ".join(f"`{name}`" for name in buffers)
        sink.warning(
            "PL385",
            f"the forward pass computes {names} from the rows of a batch: each data rank has other "
            "values, and an export has those of rank 0",
            *labels,
            facts=[_SEEN],
            help="average them over the data ranks before an evaluation or export, by "
            "`torch.distributed.all_reduce(buffer, group=run.data_mesh.get_group())` and "
            '`run.data_size`; if it is meant, say `ignore = ["PL385"]` in `[tool.planc]` of '
            "pyproject.toml",
        )


def _coupled_microbatches(outcome: Outcome, mesh: Mesh, sink: Sink) -> None:
    """Reports a module that mixes the rows of a batch, under a pipeline (PL513)."""
    for mismatch in outcome.of_kind("microbatch"):
        sink.warning(
            "PL513",
            f"the output of {_where(mismatch)} for a row depends on the other rows of the batch: "
            "each microbatch of the pipeline computes it from its own rows alone",
            *(axis.label for axis in mesh.of_role(AxisRole.STAGE)),
            facts=[_SEEN],
            help="`microbatches = 1` computes it from all rows of a data rank; or train without "
            "this module's statistics of the batch",
        )


def _of_the_whole_batch(mismatch: Discrepancy) -> str:
    return (
        f"the gradient of `{generic(mismatch.detail)}` differs by {mismatch.error:.1e} from "
        "that of the whole batch in one process"
    )


def _lengths(outcome: Outcome, mesh: Mesh, sink: Sink) -> None:
    """Reports that the plan is right for lengths alone that the tensor axes divide (PL516)."""
    axes = [axis for axis in mesh.of_role(AxisRole.TENSOR) if axis.size > 1]
    for mismatch in outcome.of_kind("lengths"):
        sink.warning(
            "PL516",
            f"sequences of a length that the tensor axis does not divide fail or are wrong in "
            f"{_where(mismatch)}; those of other lengths are right",
            *(axis.label for axis in axes),
            facts=[*([mismatch.detail] if mismatch.detail else []), *_source(mismatch), _SEEN],
            help="pad rows on the right to a length that it divides; or keep shards of a "
            "sequence DTensors (`local = false`): a local shard does not say the whole length",
        )


def _where(mismatch: Discrepancy) -> str:
    return f"`{generic(mismatch.subject)}`" if mismatch.subject else "the model"


def report_unstated(outcome: Outcome, small: Plan, sink: Sink) -> None:
    """Reports layouts (PL505) and redistributions (PL506) that the plan does not state, where the
    numbers are right.
    """
    groups = _groups(outcome, small)
    for group in [g for g in groups if g[0].kind == "boundary"][:_MOST]:
        _boundary(group, small, sink, Severity.WARNING)
    for group in [g for g in groups if g[0].kind == "unstated"][:_MOST]:
        mismatch, subject = group[0], generic(group[0].subject)
        before, after = mismatch.layouts
        change = f"{before} -> {after} (for {mismatch.op})"
        where = f"`{subject or 'the model'}`"
        message = f"implicit redistribution in {where}, which no rule states: {change}"
        labels = _with_before(mismatch, small)
        advice = "state it with a style, `input(...)` or `output(...)`, or keep it implicit"
        facts = [*_source(mismatch), _SEEN]
        sink.warning("PL506", message, *labels, facts=facts, help=advice)


def _boundary(
    group: list[Discrepancy], small: Plan, sink: Sink, severity: Severity, *consequence: str
) -> None:
    mismatch = group[0]
    before, after = mismatch.layouts
    names = one_of((f"`{n}`" for n in together({generic(m.subject): 0 for m in group})), last="and")
    sink.report(
        severity,
        "PL505",
        f"the input of {names} has layout {after}; the plan states {before}",
        *rule_labels(mismatch.subject, small),
        facts=[*consequence, *_source(mismatch), _SEEN],
        help=f"state this layout: {_statement(mismatch, small)}",
    )


def _statement(mismatch: Discrepancy, small: Plan) -> str:
    """The statement of the layout that arrives: a dim of `sequence`, or the source of an arrow."""
    before, after = mismatch.layouts
    styles = (r.style for r in small.tensor if r.modules.has(mismatch.subject))
    dim = re.fullmatch(r"shard\((.*)\)", after)
    if dim and any(isinstance(style, Sequence) for style in styles):
        return f"`sequence(dim = {dim[1]})`, with the other arguments as they are"
    return f"`{after} -> ...` instead of `{before} -> ...`"


def _groups(outcome: Outcome, small: Plan) -> list[list[Discrepancy]]:
    """The discrepancies, grouped by identical modules; inputs, by the lines that state them."""
    groups: dict[tuple[str, str, tuple[str, ...], str], list[Discrepancy]] = {}
    for mismatch in outcome.discrepancies:
        subject = generic(mismatch.subject)
        if mismatch.kind == "boundary":
            subject = "\n".join(label.span.place for label in rule_labels(mismatch.subject, small))
        key = (mismatch.kind, subject, mismatch.layouts, mismatch.op)
        groups.setdefault(key, []).append(mismatch)
    return list(groups.values())


def _source(mismatch: Discrepancy) -> list[str]:
    return [f"the model's own code: {mismatch.line}"] if mismatch.line else []


def _module(group: list[Discrepancy]) -> str:
    name = group[0].subject
    return generic(name.rpartition(".")[0] if group[0].kind in _OF_PARAMETERS else name)


def _consequence(mismatch: Discrepancy) -> str:
    if mismatch.kind == "crash":
        return f"the model raises there: {mismatch.detail}"
    what = "its output is wrong" if mismatch.kind == "output" else "its gradient is wrong"
    return f"{what}, by {mismatch.error:.1e}"


def _of_replicated(tie: TiedStyles, group: list[Discrepancy]) -> bool:
    """Whether a module has a tied parameter that no rule shards, so that its computation gets the
    shard of the other name.
    """
    holders = {generic(n.rpartition(".")[0]) for n in tie.replicated}
    return group[0].kind != "size" and _module(group) in holders


def _report_tie(tie: TiedStyles, group: list[Discrepancy], sink: Sink) -> None:
    mismatch = group[0]
    measured = mismatch.detail or f"relative error {mismatch.error:.1e}"
    facts = [*tie.facts, measured, *_source(mismatch), _SEEN]
    message = f"{tie.message}: {what_is_wrong(mismatch.kind, f'`{_module(group)}`')}"
    match mismatch.kind:
        case "crash":
            sink.error("PL503", message, *tie.labels, facts=facts, help=TiedStyles.HELP)
        case "output":
            sink.error("PL501", message, *tie.labels, facts=facts, help=TiedStyles.HELP)
        case _:
            sink.error("PL502", message, *tie.labels, facts=facts, help=TiedStyles.HELP)


def what_is_wrong(kind: str, where: str) -> str:
    """A sentence about a discrepancy in a place, by its kind."""
    match kind:
        case "crash":
            return f"the model raises in {where}"
        case "output":
            return f"the output of {where} is wrong"
        case _:
            return f"the gradient of {where} is wrong"


def _with_before(mismatch: Discrepancy, small: Plan) -> list[Label]:
    """The labels of a module, and those of the rules for the one that ended last, if any has."""
    labels = list(rule_labels(mismatch.subject, small))
    if not mismatch.before:
        return labels
    marked = {label.span for label in labels}
    before = (label.span for label in rule_labels(mismatch.before, small))
    more = (Label(span=span, text="ended just before") for span in before if span not in marked)
    return [*labels, *more]


def _crash(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    labels = _with_before(mismatch, small)
    message = f"the model raises{f' in `{subject}`' if subject else ''} under this plan"
    facts = [mismatch.detail, *_source(mismatch), _SEEN]
    sink.error("PL503", message, *labels, facts=facts)


def _output(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    facts = [f"the first output that differs, by {mismatch.error:.1e}"]
    facts += [mismatch.detail] if mismatch.detail else []
    message = f"the output of `{subject or 'the model'}` is wrong under this plan"
    facts += [*_source(mismatch), _SEEN]
    labels = _with_before(mismatch, small)
    sink.error("PL501", message, *labels, facts=facts)


def _context(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    measured = f"relative error {mismatch.error:.1e}" if mismatch.error else ""
    facts = [mismatch.detail or measured, "with whole sequences on each rank it is right"]
    if mismatch.detail == LOSS_ALONE:
        facts[:1] = [f"{LOSS_ALONE}; {measured}"]
    help = (
        "the loss is not a sum or mean over tokens; if it has a router's auxiliary loss, set "
        "`output_router_logits = false` in the model's configuration, or the axis to 1"
        if mismatch.detail == LOSS_ALONE
        else "ranks see each other's tokens through transformers' attention interface, not through "
        "convolutions, recurrences, or attention that the model calls otherwise; with `attention = "
        "gather` each attention module gets the tokens of all ranks"
    )
    if any(rule.op is not None and rule.op.patches for rule in small.context):
        help = "set the axis to 1: the attention of these versions of diffusers is not known"
    sink.error(
        "PL541",
        f"`{subject or 'the model'}` is wrong if each rank has a sequence shard",
        *(rule.origin for rule in small.context),
        facts=[*facts, *_source(mismatch), _SEEN],
        help=help,
    )


def _draws(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    """Reports random numbers that the recorded forward pass lacks, so no operation syncs them."""
    mismatch, subject = group[0], generic(group[0].subject)
    message = f"{mismatch.detail}, in `{subject or 'the model'}`"
    labels = rule_labels(mismatch.subject, small)
    help = (
        "generate random numbers in each pass, as `nn.Dropout` does: the recorded forward pass "
        "had none here"
    )
    sink.error("PL511", message, *labels, facts=[*_source(mismatch), _SEEN], help=help)


def _gradient(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    module = mismatch.subject.rpartition(".")[0]
    worst = max(p.error for p in group)
    help = None
    if mismatch.kind == "partial":
        message = f"the gradient of `{subject}` is partial on each rank, and nothing reduces it"
        detail = f"the ranks' gradients differ by up to {worst:.1e}"
        last = module.rpartition(".")[2]
        help = f"give it a style that reduces its gradient: `{last} : replicate(gradient = sum)`"
        if not small.sequence:
            help += "; or write `sequence = auto` in the section, and planc infers such rules"
    else:
        message = f"the gradient of `{subject}` is wrong under this plan"
        detail = f"relative error {worst:.1e}"
        detail += f"; {mismatch.detail}" if mismatch.detail else ""
    facts = [detail, *_source(mismatch), _SEEN]
    sink.error("PL502", message, *rule_labels(module, small), facts=facts, help=help)


def _later(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    if mismatch.kind == "norm":
        message = "the norm of the gradients is wrong under this plan, so clipping is"
    else:
        message = f"`{subject}` is wrong after two steps under this plan"
    facts = [f"relative error {mismatch.error:.1e}, while every gradient is right", _SEEN]
    module = mismatch.subject.rpartition(".")[0]
    inside = [
        r for r in small.optimizer if any(below(mismatch.subject, n) for n in r.modules.names())
    ]
    own = [r for r in inside[-1:] if isinstance(r.op.algorithm, OptimizerClass)]
    by = [Label(span=rule.origin, text="steps it, by code of your own") for rule in own]
    help = "on a shard, `to_local()` is one rank's part: norms and sums of it are not the whole's"
    labels = (*by, *rule_labels(module, small))
    sink.error("PL509", message, *labels, facts=facts, help=help if by else None)


def _uneven(found: list[Discrepancy], small: Plan, sink: Sink) -> None:
    names = list(dict.fromkeys(generic(one.subject) for one in found))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    holders = dict.fromkeys(one.subject.rpartition(".")[0] for one in found)
    labels = {label.span: label for name in holders for label in unit_labels(name, small)}
    sink.error(
        "PL512",
        f"only some data ranks use `{names[0]}`{more}: which parameters a pass uses depends on its "
        "rows",
        *list(labels.values())[:_MOST],
        facts=[
            found[0].detail,
            "torch reduces the gradients that a rank has in one buffer, whose size then differs",
            _SEEN,
        ],
        help="run each of them in every pass, with no rows where there are none: "
        "`expert(x[:0])`; its gradient is zero then",
    )


def _size(group: list[Discrepancy], small: Plan, sink: Sink) -> None:
    mismatch, subject = group[0], generic(group[0].subject)
    sink.error(
        "PL507",
        f"`{subject}` gets {mismatch.detail}: the length of a local shard, not of the sequence",
        *rule_labels(mismatch.subject, small),
        facts=[*_source(mismatch), _SEEN],
        help="return the sharded activations as a DTensor, which has the global size: `local = "
        "false`",
    )


def report_uncalled(ran: Set[str], plan: Plan, sink: Sink) -> bool:
    """Reports units whose module is never called although modules inside are (PL508), as FSDP
    all-gathers at the call; returns whether there are any. `ran` may have `*` for indices.
    """
    found = False
    for unit in plan.fsdp.units if plan.fsdp else ():
        for modules in unit.members:
            every = ((n, generic(n)) for n in modules.names() if n)
            name, star = next((n for n in every if ran.isdisjoint(n)), ("", ""))
            inside = next((n for n in sorted(ran) if below(n, name) or below(n, star)), None)
            if not name or inside is None:
                continue
            found = True
            sink.error(
                "PL508",
                f"`{star}` is an FSDP unit and is never called as a module",
                unit.origin,
                facts=[
                    f"the model's own code calls `{generic(inside)}` inside it",
                    "seen in a run of the model, made small where it has a configuration",
                ],
                help="make the called module the unit, or leave its parameters in the root unit",
            )
    return found


_REPORTERS: dict[str, Callable[[list[Discrepancy], Plan, Sink], None]] = {
    "crash": _crash,
    "output": _output,
    "size": _size,
    "context": _context,
    "draws": _draws,
    "norm": _later,
    "parameter": _later,
}
