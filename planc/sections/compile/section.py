"""The compile section -> the modules that are compiled."""

from planc.elaborate.call_arguments import Arguments
from planc.elaborate.program import Program
from planc.elaborate.sections.tensor import read_claims
from planc.ops.base import AxisRole
from planc.sections.compile.ops import Compile
from planc.syntax import ast


def read(program: Program) -> tuple[Compile, ...]:
    """The operations of the compile sections, in the plan's order."""

    def rule_of(rule: ast.Rule) -> tuple[Compile | None] | None:
        arguments = Arguments(rule.action, program.scope, ("fullgraph", "async_tp"))
        fullgraph = arguments.truth("fullgraph", False)
        asked = arguments.truth("async_tp", False)
        axes = program.mesh.of_role(AxisRole.TENSOR) if program.mesh and asked else ()
        wide = tuple(a.name for a in axes if a.size > 1)
        op = Compile(modules=program.facts.model, fullgraph=fullgraph, async_tp=wide)
        return (op,) if arguments.done() else None

    return read_claims(program, "compile", ("block",), "way to compile", rule_of).rules()
