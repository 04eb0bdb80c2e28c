"""The library functions that planc replaces or wraps have the source that planc was written for.

A change of their body is not seen by a name or by a signature. Where one has changed, read what
did, adapt planc if it matters, and record the new source with `pytest
tests/compat/test_replaced.py --update`.
"""

import ast
import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

_FSDP = "torch.distributed.fsdp._fully_shard"
_TENSOR = "torch.distributed.tensor"
_THREADS = "torch.testing._internal.distributed.multi_threaded_pg"
REPLACED = (
    f"{_FSDP}._fsdp_param_group:RegisterPostBackwardFunction",
    f"{_FSDP}._fsdp_param_group:FSDPParamGroup.pre_forward",
    f"{_FSDP}._fsdp_param_group:FSDPParamGroup.pre_backward",
    f"{_FSDP}._fsdp_param_group:FSDPParamGroup.post_backward",
    f"{_FSDP}._fsdp_state:FSDPState._pre_forward",
    f"{_FSDP}._fsdp_state:FSDPState._post_forward",
    "torch.autograd.graph:_engine_run_backward",
    "torch.distributed._functional_collectives:_maybe_wrap_tensor",
    f"{_TENSOR}._utils:ExplicitRedistributionContext",
    f"{_TENSOR}._sharding_prop:ShardingPropagator.propagate_op_sharding_non_cached",
    f"{_TENSOR}._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    "torch.nn.utils.clip_grad:_clip_grads_with_norm_",
    "torch.nn.utils.clip_grad:_get_total_norm",
    f"{_THREADS}:Collective.join",
    f"{_THREADS}:ProcessLocalGroup._start_coll",
    "torch.utils.checkpoint:_CachingTorchDispatchMode",
    "torch.utils.checkpoint:_VersionWrapper",
    "transformers.masking_utils:chunked_causal_mask_function",
    "transformers.masking_utils:find_packed_sequence_indices",
    "transformers.utils.import_utils:create_import_structure_from_path",
)
RECORDED = Path(__file__).parent / "replaced.json"
"""The digests of the sources that planc was written for, by name."""


def source_digest(name):
    """The sha256 of a definition's code, without comments and docstrings; imports no library."""
    module, _, path = name.partition(":")
    node = ast.parse(source_file(module).read_text(encoding="utf-8"))
    for part in path.split("."):
        node = next(n for n in ast.walk(node) if getattr(n, "name", "") == part)
    return hashlib.sha256(code_of(node).encode()).hexdigest()[:16]


def code_of(node):
    """The code of a definition without docstrings, which leave the node."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node)


def source_file(module):
    package, *parts = module.split(".")
    folder = Path(find_spec(package).origin).parent
    return folder.joinpath(*parts).with_suffix(".py")


@pytest.mark.parametrize("name", REPLACED)
def test_the_source_is_the_one_that_planc_was_written_for(name, request):
    known = json.loads(RECORDED.read_text())
    digest = source_digest(name)
    if request.config.getoption("--update") and digest not in known.get(name, []):
        known[name] = [*known.get(name, []), digest]
        RECORDED.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    assert digest in known.get(name, []), f"{name} has another body: see the head of this file"


def test_every_name_is_recorded():
    assert sorted(json.loads(RECORDED.read_text())) == sorted(REPLACED)


def test_a_changed_body_has_another_digest(tmp_path, monkeypatch):
    file = tmp_path / "functions.py"
    monkeypatch.setattr("test_replaced.source_file", lambda _: file)
    file.write_text('def f(x):\n    """Adds."""\n    return x + 1  # one\n')
    before = source_digest("functions:f")
    file.write_text("def f(x):\n    return x + 1\n")
    assert source_digest("functions:f") == before
    file.write_text("def f(x):\n    return x + 2\n")
    assert source_digest("functions:f") != before
