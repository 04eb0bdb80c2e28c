"""`planc init`: writes a first plan from model facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from planc import compiler
from planc.diagnostics.diagnostic import Diagnostic, Sink, one_of
from planc.ir.mesh_axes import CONTEXT, EXPERTS, STAGES
from planc.model import cache
from planc.model.facts import Facts, generic
from planc.model.layer_kinds import block_lists
from planc.model.load import load
from planc.model.randomness import random_numbers_kept
from planc.model.roles import RoleModules
from planc.model.roles import roles as role_modules
from planc.model.sources.huggingface import defaults
from planc.proof.layout_flow import advice, flow
from planc.proof.small_case import SmallModel, small_model
from planc.proxy.flow import FlowSource, flow_of
from planc.simulate.outcome import Outcome
from planc.syntax.formatter.layout import laid_out
from planc.tools.init.from_transformers import tp_plan
from planc.tools.init.left_replicated import comments
from planc.tools.init.plan_text import BLOCKS, DECODER, Draft, parsed_text, render
from planc.tools.init.roles import Roles, RunRecord, roles
from planc.tools.init.search import Search, left_whole, named_below


@dataclass(frozen=True, slots=True, kw_only=True)
class InitResult:
    """The plan, layout flow's outcome, whether it offers `sequence`, and the number of runs.

    Args:
        findings: what could not be decided or proved, as `planc.init` returns it.
    """

    text: str
    outcome: Outcome
    sequence: bool
    runs: int
    findings: tuple[Diagnostic, ...] = ()

    def __str__(self) -> str:
        return self.text.rstrip()


@random_numbers_kept()
def draft_text(
    model: str | Facts,
    settings: Iterable[str],
    sink: Sink,
    *,
    allow_code: bool = False,
    of_transformers: bool = False,
) -> InitResult | None:
    """A first plan for a model that is named, or its facts, with axes as `pp=2`; None after an
    error (PL106, PL012: the axes, PL60x: the model, PL581: no plan of transformers, PL760: no
    torch). `of_transformers`: with the splits of transformers' own plan.
    """
    sizes = read_sizes(settings, sink)
    if cache.missing():
        message = f"a draft is proved as it is written: {cache.not_installed()}"
        sink.error("PL760", message, help=cache.INSTALL)
    if sink.has_errors:
        return None
    facts = load(model, sink, allow_code=allow_code) if isinstance(model, str) else model
    if facts is None:
        return None
    given = tp_plan(facts) if of_transformers else None
    if given is not None and not given:
        message = f"transformers has no tensor-parallel plan for {facts.name}"
        sink.error("PL581", message, help="`planc init` without `--from` finds the splits itself")
        return None
    return draft(facts, sink, sizes, given)


def read_sizes(settings: Iterable[str], sink: Sink) -> dict[str, int]:
    """The sizes above one of `NAME=SIZE`; PL106 for another name, PL012 for no size."""
    sizes: dict[str, int] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in (STAGES, CONTEXT, EXPERTS):
            known = "it can set pp, cp and ep"
            sink.error("PL106", f"`--set {name}` names no axis of a drafted plan", help=known)
        elif not value.isdecimal() or int(value) < 1:
            sink.error("PL012", f"`{name}` is a positive number, not `{value}`")
        elif int(value) > 1:
            sizes[name] = int(value)
    return sizes


@random_numbers_kept()
def draft(
    facts: Facts,
    sink: Sink,
    sizes: Mapping[str, int] | None = None,
    given: Mapping[str, str] | None = None,
) -> InitResult:
    """A first plan for a model.

    Args:
        sink: receives PL660 (what could not be decided or proved) and PL661 (a rule of
            transformers' own plan that matches nothing).
        sizes: of the axes `pp`, `cp` and `ep`, where they are above one.
        given: transformers' own plan, whose splits the draft has then.
    """
    known, model, ran = _small(facts)
    record = ran if isinstance(ran, RunRecord) else None
    model_roles = roles(known, record)
    draft_plan = _draft_plan(facts, known, model_roles, record)
    search = Search(known, model, model_roles, record, draft_plan, given)
    if isinstance(ran, str):
        outcome = Outcome(verdict="unknown", reason=ran)
        help = advice(facts, ran)
        sink.warning("PL660", f"this plan could not be proved: {ran}", help=help)
        search.cautious()
        draft_plan.comment.append(f"Not proved: {ran}. Only embeddings and heads are sharded.")
    else:
        outcome = search.settle()
        if outcome.verdict == "proved":
            search.with_sequence()
        _comments(draft_plan, search, outcome, sink)
    draft_plan.comment += comments(render(draft_plan), facts, search, sink)
    _unmatched_rules(facts, draft_plan, sink)
    if sizes:
        _set_sizes(draft_plan, facts, sizes, sink)
    return InitResult(
        text=laid_out(render(draft_plan)),
        outcome=outcome,
        sequence=draft_plan.sequence != "false",
        runs=search.runs,
    )


def _set_sizes(draft_plan: Draft, facts: Facts, sizes: Mapping[str, int], sink: Sink) -> None:
    """Sets the sizes of axes in a draft, and proves it with them."""
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
    why = "no module with experts is known" if EXPERTS in sizes and not draft_plan.experts else ""
    if not draft_plan.base:
        why = "its blocks are those of no language model"
    else:
        left = {n: s for n, s in sizes.items() if n != EXPERTS or draft_plan.experts}
        draft_plan.sizes = left
        why = why or _proof_failure(laid_out(render(draft_plan)), facts, left)
        if why and CONTEXT in left:  # attention may be the model's own code
            draft_plan.own_attention = True
            if _proof_failure(laid_out(render(draft_plan)), facts, left):
                draft_plan.own_attention = False
            else:
                why = ""
    if why:
        sink.warning("PL660", f"this plan could not be proved with {shown}: {why}")
    comment = (
        f"Not proved with {shown}: {why}." if why else f"Layout flow proved it with {shown} too."
    )
    draft_plan.comment.append(comment)


def _small(facts: Facts) -> tuple[Facts, SmallModel | None, RunRecord | str]:
    """The facts of the proxy model, the model, and its run, or the reason why there is none.

    Without a proxy model, the facts are those of the original model.
    """
    model = small_model(facts)
    if isinstance(model, str):
        return facts, None, model
    quiet = Sink()
    try:
        small = model.facts(facts, quiet)
    except Exception as error:
        return facts, None, f"it cannot be built at a small size: {error}"
    if small is None:
        return facts, None, next(d.message for d in quiet)
    flow = flow_of(FlowSource(facts=small, values=model.values, kept=model.kept), facts)
    if isinstance(flow, str):
        return small, model, flow
    ran = RunRecord.from_flow(flow)
    states = "hidden states [batch, sequence, features]"
    none = f"the proxy model does not run: no module takes {states}"
    return small, model, ran if ran.width else none


def _draft_plan(facts: Facts, known: Facts, model_roles: Roles, ran: RunRecord | None) -> Draft:
    """The parts of the draft that are decided before any split: names and units."""
    head = model_roles.heads[-1] if model_roles.heads else None
    names = known.tied_modules
    draft_plan = Draft(
        name=re.sub(r"\W", "_", facts.family),
        family=facts.family,
        blocks=[b.path for b in model_roles.blocks],
        called={b.path for b in model_roles.blocks if _are_called(b.path, ran)},
    )
    draft_plan.units = dict(_untied_blocks(known, model_roles, names))
    draft_plan.tied = {model_roles.embedding, head} <= names
    inner = {n for n in names if any(n.startswith(f"{b.path}.") for b in model_roles.blocks)}
    if (
        not names - inner - {model_roles.embedding, head}
    ):  # else tied parameters stay in the root unit
        draft_plan.embedding, draft_plan.head = model_roles.embedding, head
        draft_plan.may_tie = "tie_word_embeddings" in facts.config and head is not None
        draft_plan.tail = _tail(model_roles, ran) if head else []
    there = role_modules(facts)
    if there.blocks:
        draft_plan.base = DECODER if _decoder(draft_plan, model_roles, there) else BLOCKS
        draft_plan.experts = frozenset(generic(n) for m in there.experts for n in m.names())
    return draft_plan


def _decoder(draft_plan: Draft, model_roles: Roles, there: RoleModules) -> bool:
    """Whether the ends of a model are those of a decoder's base plan."""
    if not draft_plan.may_tie or len(model_roles.heads) != 1:
        return False
    mine = ([draft_plan.embedding, *model_roles.same], draft_plan.tail, [draft_plan.head])
    theirs = (there.embedding, there.final_norm, there.head)
    return mine == tuple([str(m) for m in modules] for modules in theirs)


def _are_called(path: str, ran: RunRecord | None) -> bool:
    """Whether the blocks of a list are called as modules, as hooks and wrappers require."""
    if ran is None:
        return True
    inside = [n.removeprefix(f"{path}.") for n in ran.order if n.startswith(f"{path}.")]
    return not inside or any("." not in name for name in inside)


def _untied_blocks(
    facts: Facts, model_roles: Roles, tied: set[str]
) -> Iterator[tuple[str, list[str]]]:
    """Lists in which some blocks share weights, with the classes of the blocks that share none.

    FSDP requires a shared tensor to be in one unit, so blocks that share one belong to the root.
    """
    for blocks in model_roles.blocks:
        at = next(m for m in block_lists(facts.model) if str(m) == blocks.path)
        sharing, classes = set(), dict.fromkeys(c.module.cls for c in at.module.children)
        for child in at.module.children:
            for index in child.indices or ():
                if any(name.startswith(f"{blocks.path}.{index}.") for name in tied):
                    sharing.add(child.module.cls)
        if sharing:
            yield blocks.path, [name for name in classes if name not in sharing]


def _tail(model_roles: Roles, ran: RunRecord | None) -> list[str]:
    if ran is None or not model_roles.blocks:
        return []
    paths = tuple(f"{b.path}." for b in model_roles.blocks)
    last = max((i for i, n in enumerate(ran.order) if n.startswith(paths)), default=0)
    return [n for n in model_roles.norms if n in ran.order and ran.order.index(n) > last]


def _comments(draft_plan: Draft, search: Search, outcome: Outcome, sink: Sink) -> None:
    """Comments for the reader: what is replicated and why, and what could not be decided."""
    source = "" if search.given is None else " with the splits of transformers' own plan"
    if outcome.verdict == "proved":
        shrunk = search.small is not None and not search.small.code
        of = f"transformers {cache.version('transformers')}" if shrunk else "this code"
        on = "a proxy model" if shrunk else "the model"
        draft_plan.comment.append(
            f"Written by planc init for {of}{source}; layout flow proved it on {on} (largest error "
            f"{outcome.worst:.0e})."
        )
    else:
        first = "".join(p.detail for p in outcome.discrepancies[:1])
        why = outcome.reason or first or "the plan is refuted"
        draft_plan.comment.append(
            f"Written by planc init{source}; layout flow could not prove it: {why}."
        )
        help = advice(search.facts, why)
        sink.warning("PL660", f"this plan could not be proved: {why}", help=help)
    if outcome.recomputed:
        draft_plan.comment.append(
            f"The model's own code runs `{generic(outcome.recomputed)}` again in the backward "
            "pass: blocks are not FSDP units, which might be resharded before that, and nothing is "
            "checkpointed."
        )
    reached = [
        c for p, choices in search.parts.items() if p not in search.unreached for c in choices
    ]
    whole = left_whole((*reached, *search.outside)) if outcome.verdict != "nothing" else ""
    if search.unreached:
        draft_plan.comment.append(
            "Replicated, because the run of the proxy model does not reach it and it cannot be "
            f"proved: {', '.join(search.unreached)}."
        )
    _missing_inputs(draft_plan, outcome, sink)
    if whole:
        draft_plan.comment.append(f"Replicated, because no way to shard it was right: {whole}.")
    if draft_plan.sequence == "false" and outcome.verdict == "proved":
        draft_plan.comment.append(f"No sequence parallelism: {search.no_sequence}.")


def _missing_inputs(draft_plan: Draft, outcome: Outcome, sink: Sink) -> None:
    """Says which inputs the run did not have (PL612)."""
    if outcome.lacks:
        lacks = one_of(outcome.lacks, last="and")
        draft_plan.comment.append(
            f"The run had no {lacks}, as no such input was found that the model takes: what they "
            "feed is not proved."
        )
        sink.info("PL612", f"the proof had no {lacks}: {outcome.missing_inputs}")


def _unmatched_rules(facts: Facts, draft_plan: Draft, sink: Sink) -> None:
    """Reports the rules of transformers' own plan that match no module of the model."""
    rules, _ = defaults(facts.family)
    names = {generic(n) for n in _names(facts)}
    names |= {n.partition(".")[2] for n in names}
    unmatched_rules = [r for r in rules if not any(f".{n}".endswith(f".{r}") for n in names)]
    if unmatched_rules:
        unmatched = ", ".join(f"`{r}`" for r in unmatched_rules)
        comment = f"transformers' own plan also names {unmatched}, which match nothing here."
        draft_plan.comment.append(comment)
        sink.info("PL661", f"rules of transformers' own plan match nothing: {unmatched}")


def _names(facts: Facts) -> Iterator[str]:
    for name, module in named_below("", facts.root):
        yield name
        yield from (f"{name}.{p.name}".removeprefix(".") for p in module.parameters)


def _proof_failure(text: str, facts: Facts, sizes: Mapping[str, int]) -> str:
    """Why layout flow does not prove a drafted plan on the ranks of its axes; empty if it does."""
    sink = Sink()
    done = compiler.compile(parsed_text(text), facts, sink, world_size=prod(sizes.values()))
    if done.lowered is not None:
        verdict = flow(done, sink)
        if verdict.verdict == "proved":
            return ""
        if verdict.verdict == "unknown":
            return verdict.reason
    return next((f"{d.code}, {d.message}" for d in sink if d.severity == "error"), "refuted")
