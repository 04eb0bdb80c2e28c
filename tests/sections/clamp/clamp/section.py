"""The clamp section -> operations."""

from planc.sections.clamp.ops import Clamp

from planc.elaborate.call_arguments import Arguments
from planc.elaborate.program import Program
from planc.elaborate.sections.tensor import read_claims
from planc.syntax import ast


def read(program: Program) -> tuple[Clamp, ...]:
    """The operations of all clamp sections."""

    def rule_of(rule: ast.Rule) -> tuple[Clamp] | None:
        arguments = Arguments(rule.action, program.scope, ("most",))
        most = arguments.number("most", 1.0, "a positive number", lambda value: value > 0)
        return (Clamp(modules=program.facts.model, most=most),) if arguments.done() else None

    return read_claims(program, "clamp", ("outputs",), "clamp", rule_of).rules()
