"""A pytest plug-in: the fixture `planc_audit` judges the plans of a model under development.

In conftest.py: `pytest_plugins = ["planc.integrations.pytest_audit"]`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from planc.diagnostics import render
from planc.diagnostics.diagnostic import Sink
from planc.tools.audit.audit import KINDS, PlanVerdict, audit_model

Audit = Callable[..., list[PlanVerdict]]


@pytest.fixture
def planc_audit() -> Audit:
    """`planc_audit(MyModelForCausalLM, MyConfig(...))` fails the test if a plan is refuted."""

    def judge(cls: Any, config: Any, kinds: Iterable[str] = KINDS) -> list[PlanVerdict]:
        from planc.tools.audit.apply import AuditedModel
        from planc.tools.audit.given_class import ClassBuilder

        sink = Sink()
        model = AuditedModel(ClassBuilder(cls, config))
        verdicts = list(audit_model(cls.__name__, model, sink, kinds))
        if sink.has_errors:
            pytest.fail(render(list(sink), "full", color=False, width=100), pytrace=False)
        return verdicts

    return judge
