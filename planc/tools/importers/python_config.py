"""Python configurations -> their leaf keys, read as a syntax tree and never run: torchtitan's
functions, and the `DistributedConfig` of a training script.
"""

import ast
from collections.abc import Iterator

from planc.diagnostics.diagnostic import Sink, did_you_mean, one_of
from planc.tools.importers.peer import ConfigKey

_MAX_BASES = 20


def python_leaves(
    name: str, text: str, function: str | None, sink: Sink
) -> tuple[ConfigKey, ...] | None:
    """The keys of the configuration that one function returns, or None after PL737.

    Args:
        name: the file.
        text: its content.
        function: the function, or None where the file has one only.
        sink: receives PL737.

    Raises:
        SyntaxError, ValueError, RecursionError: the text is not Python, or not in bounds.
    """
    tree = ast.parse(text)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_distributed_config(n)]
    if function is None and len(calls) == 1:
        variables = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        return tuple(_value(calls[0], "", variables))
    functions = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and "Config" in ast.unparse(node.returns or node.args)
    }
    if function is None and len(functions) == 1:
        function = next(iter(functions))
    if function not in functions:
        have = one_of(functions, last="and") or "none"
        known = f"write {name}:NAME with one of {have}"
        sink.error(
            "PL737",
            f"{name} has no configuration `{function}`"
            if function
            else f"{name} has {len(functions)} functions that return a configuration",
            help=did_you_mean(function, functions, known) if function else known,
        )
        return None
    return tuple(_function_leaves(functions[function], functions, _MAX_BASES).values())


def _is_distributed_config(call: ast.Call) -> bool:
    """Whether a call makes a `DistributedConfig` of transformers."""
    return ast.unparse(call.func).rpartition(".")[2] == "DistributedConfig"


def _function_leaves(
    node: ast.FunctionDef, known: dict[str, ast.FunctionDef], depth: int
) -> dict[str, ConfigKey]:
    """The leaves of a function by path; a later assignment replaces what a base function set."""
    if depth == 0:
        raise RecursionError
    result: dict[str, ConfigKey] = {}
    local: dict[str, ast.expr] = {}
    ends = (s.value for s in node.body if isinstance(s, ast.Return))
    returned = {value.id for value in ends if isinstance(value, ast.Name)}
    for statement in node.body:
        value = getattr(statement, "value", None)
        name = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.ImportFrom() | ast.Import():
                pass
            case ast.Return(value=ast.Name()):
                pass
            case ast.Return() | ast.Assign() if name in known:
                result.update(_function_leaves(known[name], known, depth - 1))
            case ast.Return() | ast.Assign() if name.endswith(("Trainer.Config", "TrainerConfig")):
                result.update((leaf.path, leaf) for leaf in _value(value, "", local))
            case ast.Assign(targets=[ast.Attribute() as target]):
                path = ast.unparse(target).partition(".")[2]
                result = {k: v for k, v in result.items() if not f"{k}.".startswith(f"{path}.")}
                result.update((leaf.path, leaf) for leaf in _value(statement.value, path, local))
            case ast.Assign(targets=[ast.Name(id=variable)]) if variable not in returned:
                local[variable] = statement.value
            case _:
                # what calls a function of another file: that of this one that it changes is read
                for call in ast.walk(statement):
                    if isinstance(call, ast.Call) and (inner := ast.unparse(call.func)) in known:
                        result.update(_function_leaves(known[inner], known, depth - 1))
                line = ast.unparse(statement).partition("\n")[0]
                leaf = ConfigKey(path=f"statement {line}", value=line, line=statement.lineno)
                result[leaf.path] = leaf
    return result


def _value(node: ast.expr | None, path: str, local: dict[str, ast.expr]) -> Iterator[ConfigKey]:
    """The leaves of a value: of a class's call, its name at the path and its arguments below it."""
    if isinstance(node, ast.Name):
        node = local.get(node.id, node)
    if isinstance(node, ast.Dict) and node.keys and all(map(_is_word, node.keys)):
        for key, inner in zip(node.keys, node.values, strict=True):
            yield from _value(inner, f"{path}.{_plain(key)}", local)
        return
    if not isinstance(node, ast.Call):
        yield ConfigKey(path=path, value=_plain(node), line=getattr(node, "lineno", None))
        return
    if path:
        yield ConfigKey(path=path, value=f"{ast.unparse(node.func)}()", line=node.lineno)
    arguments = [(str(at), argument) for at, argument in enumerate(node.args)]
    for name, argument in [*arguments, *((k.arg or "**", k.value) for k in node.keywords)]:
        yield from _value(argument, f"{path}.{name}" if path else name, local)


def _is_word(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _plain(node: ast.expr | None) -> object:
    """The value of a literal, else the text of the expression."""
    try:
        return ast.literal_eval(node) if node else None
    except (ValueError, TypeError, MemoryError):
        return ast.unparse(node) if node else None
