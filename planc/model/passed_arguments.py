"""The signature of a forward that passes its arguments on to the forward of a base class."""

import inspect
from collections.abc import Iterator
from inspect import Parameter, Signature
from itertools import pairwise
from types import FunctionType
from typing import Any

from planc.model.shipped import is_shipped


def name_passed_arguments(model: Any) -> None:
    """Names the arguments that the forward of a script's class passes on by `**kwargs`.

    `inspect.signature` then has the arguments of the base class's forward, by which planc and
    other libraries decide which inputs a model accepts. Calls do not change.

    Args:
        model: an instance of a class such as `class Mine(LlamaForCausalLM)`, whose forward is
            `forward(self, *args, **kwargs)`.
    """
    bases = [base for base in type(model).__mro__ if "forward" in vars(base)]
    for kind, base in reversed([*pairwise(bases)]):
        forward = vars(kind)["forward"]
        if isinstance(forward, FunctionType) and not is_shipped(kind) and _calls(forward, bases):
            stated, passed = inspect.signature(forward), inspect.signature(vars(base)["forward"])
            forward.__signature__ = Signature([*_merge_parameters(stated, passed)])  # type: ignore[attr-defined]


def _calls(forward: FunctionType, bases: list[type]) -> bool:
    """Whether the code of a forward names the forward of another class."""
    names = {*forward.__code__.co_names}
    return "forward" in names and not names.isdisjoint({"super", *(b.__name__ for b in bases)})


def _merge_parameters(signature: Signature, passed: Signature) -> Iterator[Parameter]:
    """The parameters of a forward, with those of the base class instead of `**kwargs`."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if Parameter.VAR_KEYWORD not in kinds:
        yield from signature.parameters.values()
        return
    stars = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    stated = [p for p in signature.parameters.values() if p.kind not in stars]
    names = {parameter.name for parameter in stated}
    others = [p for name, p in passed.parameters.items() if name not in names]
    if len(stated) > 1 or Parameter.VAR_POSITIONAL not in kinds:  # `self` is one
        positional = Parameter.POSITIONAL_OR_KEYWORD
        others = [
            p.replace(kind=Parameter.KEYWORD_ONLY) if p.kind is positional else p
            for p in others
            if p.kind is not Parameter.VAR_POSITIONAL
        ]
    yield from sorted([*stated, *others], key=lambda parameter: parameter.kind)
