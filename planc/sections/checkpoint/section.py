"""The checkpoint and compile sections: activation checkpointing and torch.compile."""

from dataclasses import replace

from planc.diagnostics.diagnostic import did_you_mean, one_of
from planc.elaborate.call_arguments import Arguments, word
from planc.elaborate.evaluate import evaluate, is_integer, number
from planc.elaborate.program import Program
from planc.elaborate.scope import Failed, Scope
from planc.elaborate.sections.tensor import read_claims
from planc.ops.activation_checkpoint import (
    GROUPS,
    Checkpoint,
    Save,
    has_operator_list,
    is_dispatched,
    like,
)
from planc.sections.checkpoint.ops import Budget
from planc.syntax import ast

_WAYS = ("full", "ops", "budget", "none")
HOST_GB_S = 50.0
"""The copy rate to the host of the profile `h100-8x`, as the other rates of budgets
(`planc.simulate.call_table`)."""
_TERMS = ("offload", "pin", "preserve_rng", "early_stop")


def read(program: Program) -> tuple[Checkpoint, ...]:
    """The operations of the checkpoint sections, in the plan's order."""

    def rule_of(rule: ast.Rule) -> tuple[Checkpoint | None] | None:
        if rule.action.name == "none":
            return (None,) if Arguments(rule.action, program.scope).done() else None
        reads = _budget if rule.action.name == "budget" else _checkpoint
        found = reads(rule.action, program.scope)
        return None if found is None else (found,)

    return read_claims(program, "checkpoint", _WAYS, "way to checkpoint", rule_of).rules()


# Actions -----------------------------------------------------------------------------------------


def _checkpoint(call: ast.Call, scope: Scope) -> Checkpoint | None:
    """`full(...)` or `ops(...)` on the whole model, or None after a finding."""
    selective = call.name == "ops"
    arguments = Arguments(call, scope, (*(("save",) if selective else ()), *_TERMS))
    save = _save(arguments) if selective else ()
    if save is None:
        return None
    pinned = next((a for a in call.arguments if a.name == "pin"), None)
    op = Checkpoint(
        modules=scope.facts.model,
        save=save,
        offload=arguments.word("offload", {"cpu": True, "none": False}, False),
        pin=arguments.truth("pin", True),
        preserve_rng=arguments.truth("preserve_rng", True),
        early_stop=arguments.truth("early_stop", True),
    )
    if pinned is not None and not op.offload and arguments.ok:
        hint = "write `offload = cpu` too"
        arguments.wrong(pinned, "`pin` has no effect without `offload`", hint)
    if op.offload and any(s.hosted for s in save) and arguments.ok:
        hint = "remove it, or the lists of calls to offload"
        arguments.wrong(call, "`offload = cpu` keeps all that is saved on the CPU", hint)
    return op if arguments.done() else None


def _budget(call: ast.Call, scope: Scope) -> Budget | None:
    """`budget(SIZE, seq = N)` on the whole model, or None after a finding."""
    arguments = Arguments(call, scope, ("rows", "seq", "offload", "host_gb_s"))
    rows, seq = arguments.integer("rows", 1), arguments.integer("seq", 0)
    host = _host(arguments)
    hint = "write `budget(20GiB, rows = 1, seq = 4096)`: the bytes of a forward pass of such rows"
    given = evaluate(arguments.positional[0].value, scope) if arguments.positional else None
    if not arguments.positional:
        arguments.wrong(call, "`budget` has no bytes, and no share of them", hint)
    elif isinstance(given, Failed):
        arguments.ok = False
    elif not number(given) or given <= 0 or (given > 1 and given != int(given)):
        node = arguments.positional[0]
        arguments.wrong(node, "a budget is a number of bytes, or a share of them up to 1", hint)
    if arguments.done(positional=1) and (rows < 1 or seq < 1):
        arguments.wrong(call, "`rows` and `seq` are 1 or more: what a budget is for", hint)
    if not arguments.ok or not number(given):
        return None
    return Budget(modules=scope.facts.model, size=given, rows=rows, seq=seq, host_gb_s=host)


def _host(arguments: Arguments) -> float:
    """GB in a second to the host's memory, for `offload = cpu`; 0 without."""
    stated = next((a for a in arguments.call.arguments if a.name == "host_gb_s"), None)
    away = arguments.word("offload", {"cpu": True, "none": False}, False)
    wanted = "GB in a second that the link to the host's memory moves each way"
    rate = arguments.number("host_gb_s", HOST_GB_S, wanted, lambda value: value > 0)
    if stated is not None and not away and arguments.ok:
        arguments.wrong(
            stated, "`host_gb_s` has no effect without `offload`", "write `offload = cpu`"
        )
    return rate if away else 0.0


def _save(arguments: Arguments) -> tuple[Save, ...] | None:
    """The list of `ops(save = [...])`, or None after a finding."""
    given = arguments.take("save")
    hint = "write what to save: `ops(save = [attention, matmul(every = 2)])`"
    if given is None:
        arguments.wrong(arguments.call, "`ops` has no list of what to save", hint)
        return None
    if not isinstance(given, ast.List):
        arguments.wrong(given, "`save` is a list", hint)
        return None
    if not given.items:
        arguments.wrong(given, "the list is empty: everything would be recomputed", "write `full`")
        return None
    found = [(item, _read_save(item, arguments)) for item in given.items]
    holders: dict[str, str] = {}
    for item, save in found:
        for op in save.ops if save else ():
            if op in holders:
                arguments.ok = False
                arguments.scope.sink.error(
                    "PL472",
                    f"`{op}` is in this list twice",
                    item.origin,
                    facts=[f"it is in `{holders[op]}`"],
                    help="remove one of the two",
                )
                break
            assert save is not None
            holders[op] = save.name
    saves = tuple(save for _, save in found if save is not None)
    return saves if len(saves) == len(found) else None


def _read_save(item: ast.Expr, arguments: Arguments) -> Save | None:
    """One entry of the list: a group or an operator, every call of it or one in N."""
    scope = arguments.scope
    every = 1
    if isinstance(item, ast.Call):
        inner = Arguments(item, scope, ("every", "calls", "offload"))
        stated, away = inner.take("calls"), inner.take("offload")
        every = inner.integer("every", 1)
        calls = () if stated is None else _calls(stated, inner, every)
        hosted = () if away is None else _calls(away, inner, every)
        if inner.ok and away is not None and not {*hosted} <= {*calls}:
            hint = "write `mm(calls = [0, 2, 4], offload = [2])`"
            inner.wrong(away, "`offload` lists which of the `calls` are kept on the CPU", hint)
        if inner.done() and every < 1:
            inner.wrong(item, f"`every` is 1 or more, not {every}", "2 keeps every second one")
        arguments.ok &= inner.ok
        found = _read_operators(item.name, item, arguments, every) if inner.ok else None
        return replace(found, calls=calls, hosted=hosted) if found else None
    value = word(item, scope) if isinstance(item, ast.Name) else evaluate(item, scope)
    if isinstance(value, str):
        return _read_operators(value, item, arguments, every)
    arguments.ok = False
    if isinstance(value, Failed):
        return None
    arguments.wrong(
        item,
        f"`{item.origin.text}` names no operators",
        f'it is {one_of([f"`{g}`" for g in GROUPS])}, or a name of torch\'s: "aten.mm.default"',
    )
    return None


def _calls(stated: ast.Expr, arguments: Arguments, every: int) -> tuple[int, ...]:
    """The numbers of `matmul(calls = [0, 4])`."""
    value = evaluate(stated, arguments.scope)
    listed = value if isinstance(value, list | tuple) else ()
    if isinstance(value, Failed):
        arguments.ok = False
    elif not listed or every != 1 or not all(is_integer(n) and 0 <= n < 1 << 16 for n in listed):
        hint = "write `calls = [0, 4]`, without `every`, for the first and the fifth in a module"
        arguments.wrong(stated, "`calls` lists which calls are saved, from 0", hint)
    return tuple(sorted({n for n in listed if is_integer(n)}))


def _read_operators(name: str, item: ast.Expr, arguments: Arguments, every: int) -> Save | None:
    """The operators that a name stands for; PL470 and PL471 for a name that torch does not know."""
    if name in GROUPS:
        return Save(name=name, every=every, ops=GROUPS[name])
    sink = arguments.scope.sink
    visible = is_dispatched(name) if has_operator_list(name) else "." in name
    if visible:
        return Save(name=name, every=every, ops=(name,))
    arguments.ok = False
    if visible is False and has_operator_list(name):
        message = f"`{name}` cannot be saved: torch decomposes it first"
        help = "name its parts: those of a linear layer are `matmul`, or `aten.mm.default`"
        sink.error("PL471", message, item.origin, facts=["it is a composite operator"], help=help)
        return None
    known = like(name) if "." in name else GROUPS
    groups = one_of([f"`{g}`" for g in GROUPS])
    sink.error(
        "PL470",
        f"there are no operators `{name}`",
        item.origin,
        help=did_you_mean(name, known, f"it is {groups}, or a name of torch's"),
    )
    return None
