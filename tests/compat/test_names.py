"""Names that libraries do not promise are there in the installed versions, and refused if not."""

import ast
import importlib
import re
import sys
from functools import reduce

import pytest
from console import call
from folders import ROOT
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group

from planc.commands import explain
from planc.compat import fsdp
from planc.compat.names import missing_name, private_names, require_assigned
from planc.diagnostics.diagnostic import PlanError
from planc.runtime.preconditions import stop
from planc.simulate.discrepancies import failed_run
from planc.simulate.thread_ranks import RankFailure

PACKAGE = ROOT / "planc"
PARTS = sorted(path.stem for path in (PACKAGE / "compat").glob("[a-z]*.py"))
APART = {"torchao": "torchao"}
"""Parts of a library that is not installed beside the others."""


def qualified_names():
    """The private names of torch that planc reads as attributes of modules, as `torch.a._b`, and
    those that operations name in texts, as `torch.a._b:C`.
    """
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value.replace(":", ".")
            if re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", text, re.I):
                found.add(text)
    return sorted(found)


def resolved(name):
    """The object of a qualified name, whose first parts are modules."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[count:], module)
    raise AssertionError(name)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_all_names(part):
    pytest.importorskip(APART.get(part, "torch"))
    module = importlib.import_module(f"planc.compat.{part}")
    assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))


def test_names_that_are_read_as_attributes_are_there():
    names = qualified_names()
    assert len(names) > 20
    # operators of torch.ops and `torch._dynamo` are there from their first use
    assert [name for name in names if not _is_there(name)] == []


def _is_there(name):
    try:
        resolved(name)
    except AttributeError:
        return False
    return True


def test_a_missing_attribute_is_refused(monkeypatch):
    monkeypatch.delattr(_fsdp_param_group, "RegisterPostBackwardFunction")
    message = refusal("fsdp", monkeypatch)
    place = "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction"
    assert f"has no `{place}`" in message and "PL743" in message and "torch 2." in message


def test_a_missing_name_of_an_import_is_refused(monkeypatch):
    monkeypatch.delattr(_fsdp_common, "TrainingState")
    place = "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState"
    assert f"has no `{place}`" in refusal("fsdp", monkeypatch)


def test_a_missing_method_is_refused(monkeypatch):
    monkeypatch.delattr(fsdp.FSDPState, "_lazy_init")
    assert "_fsdp_state.FSDPState._lazy_init`" in refusal("fsdp", monkeypatch)


def test_an_attribute_that_no_method_assigns_is_refused():
    class Unit:
        def __init__(self):
            self.groups = []

    require_assigned("torch", Unit, "groups")
    with pytest.raises(PlanError, match=r"Unit\._groups`"):
        require_assigned("torch", Unit, "_groups")


def test_a_missing_module_is_refused(monkeypatch):
    importlib.import_module("planc.compat.transformers")  # transformers itself imports it first
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    message = refusal("transformers", monkeypatch)
    assert "transformers 5." in message and "has no `transformers.core_model_loading`" in message


def test_a_library_that_is_not_installed_is_no_missing_name():
    with pytest.raises(ModuleNotFoundError, match="not_there"), private_names("not-there"):
        importlib.import_module("not_there")


def test_a_command_shows_the_refusal(monkeypatch):
    monkeypatch.delattr(_fsdp_common, "TrainingState")
    monkeypatch.delitem(sys.modules, "planc.compat.fsdp")
    monkeypatch.setattr(explain, "run", lambda _: importlib.import_module("planc.compat.fsdp"))
    code, out, err = call("explain", "PL001")
    assert code == 2 and out == "" and "error[PL743]: torch 2." in err and "TrainingState" in err


def test_a_missing_name_does_not_refute_a_plan(monkeypatch):
    """A rank finds it where it applies the plan, or in a step."""
    monkeypatch.delattr(_fsdp_common, "TrainingState")
    monkeypatch.delitem(sys.modules, "planc.compat.fsdp", raising=False)
    with pytest.raises(PlanError) as found:
        importlib.import_module("planc.compat.fsdp")
    wrapped = stop("PL492", "torch refused an operation")
    wrapped.__cause__ = found.value
    for error in (found.value, wrapped):
        with pytest.raises(PlanError, match="PL743"):
            failed_run(RankFailure(error=error, rank=0), runs=None)
    assert missing_name(stop("PL492", "torch refused an operation")) is None


def refusal(part, monkeypatch):
    """The message of the import of a part."""
    monkeypatch.delitem(sys.modules, f"planc.compat.{part}", raising=False)
    with pytest.raises(PlanError) as error:
        importlib.import_module(f"planc.compat.{part}")
    return str(error.value)
