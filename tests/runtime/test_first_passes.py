"""The checksums that ranks compare, and the hook that compares, without ranks."""

import contextlib
import copy
import linecache
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn

import planc
from planc.runtime.preconditions import stop
from planc.runtime.safeguards.checksums import model_sums, plain, tensor_sum
from planc.runtime.safeguards.inputs import PassComparison, leaves_of, watch
from planc.runtime.safeguards.weights import SameWeights
from planc.runtime.script_line import script_line

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 600_001), (0, 4)])
def test_a_checksum_sees_each_value_and_its_place(dtype, shape):
    values = (torch.arange(max(torch.Size(shape).numel(), 1)) % 2).float()[
        : torch.Size(shape).numel()
    ]
    tensor = values.reshape(shape).to(dtype)
    total = tensor_sum(tensor)
    assert total.dtype is torch.int64 and total.shape == ()
    assert tensor_sum(tensor.clone()) == total
    flat = values.clone()
    for at in {0, len(flat) // 2, len(flat) - 1} if len(flat) else ():
        other = flat.clone()
        other[at] = 1 - other[at]
        assert tensor_sum(other.reshape(shape).to(dtype)) != total
    if len(flat) > 1:
        swapped = flat.clone()
        swapped[[0, 1]] = swapped[[1, 0]]
        assert tensor_sum(swapped.reshape(shape).to(dtype)) != total


def test_a_view_has_the_sum_of_its_values():
    base = torch.arange(100, dtype=torch.uint8)
    assert tensor_sum(base[1:99]) == tensor_sum(base[1:99].clone())
    square = base.view(10, 10)
    assert tensor_sum(square.t()) == tensor_sum(square.t().contiguous()) != tensor_sum(square)


def test_the_sums_of_a_model_are_of_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = model_sums(model)
    assert before == model_sums(copy.deepcopy(model))
    assert {"0.weight", "1.running_mean"} < before.keys()
    model[1].running_mean[2] = 1e-3
    after = model_sums(model)
    assert [n for n in before if before[n] != after[n]] == ["1.running_mean"]
    meta = model_sums(copy.deepcopy(model).to("meta"))
    assert all(meta[n] != after[n] for n in after)
    assert not plain(torch.empty(2, device="meta")) and plain(nn.Parameter(torch.empty(2)))


def lines_of(name, text, module="train"):
    """The line that a function in a file of that name is at, where it asks for it."""
    known = {"__name__": module, "script_line": script_line}
    exec(compile(text, name, "exec"), known)
    return known["ask"]


@pytest.mark.parametrize(
    "library",
    [
        "/venv/lib/python3.11/site-packages/transformers/trainer.py",
        "/usr/lib/python3/dist-packages/trainer.py",
        contextlib.__file__,
        str(Path(planc.__file__).parent / "integrations" / "trainer.py"),
        str(Path(sysconfig.get_path("scripts")) / "train"),
        "<string>",
    ],
)
def test_the_line_of_the_script_is_outside_of_libraries(library):
    ask = lines_of(library, "def ask():\n    return script_line('told')\n")
    (label,) = ask()
    assert label.text == "told" and label.span.text == "(label,) = ask()"
    assert Path(label.span.source.name).name == Path(__file__).name


def test_a_script_is_named_from_the_working_folder(tmp_path, monkeypatch):
    text = "# ä script\ndef ask():\n    return script_line(\n        'told')\n"
    path = tmp_path / "own" / "train.py"
    path.parent.mkdir()
    path.write_text(text)
    ask = lines_of(str(path), text)
    assert ask()[0].span.place == f"{path}:3"
    monkeypatch.chdir(tmp_path)
    (label,) = ask()
    assert label.span.place == f"{Path('own', 'train.py')}:3"
    assert label.span.text == "return script_line(" and label.span.column == 5
    assert str(stop("PL484", "no", label)).startswith(f"{label.span.place}: error[PL484]: no")
    path.write_text("")
    linecache.checkcache()
    assert ask() == ()


def test_a_cell_has_a_line_and_what_is_typed_in_has_none(monkeypatch):
    text = "def ask(): return script_line()\n"
    assert lines_of("<stdin>", text, "__main__")() == ()
    monkeypatch.setitem(linecache.cache, "<cell>", (len(text), None, [text], "<cell>"))
    assert lines_of("<cell>", text, "__main__")()[0].span.place == "<cell>:1"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def refusing():
    built = stop("PL484", "the ranks have built different weights")
    return PassComparison(weights=SameWeights(built=built))


def test_weights_that_are_loaded_clear_the_error():
    model, first = Model(), refusing()
    watch(model, first)
    for _ in range(2):
        with pytest.raises(Exception, match="PL484"):
            model(torch.zeros(1, 4))
    partial = {"linear.weight": torch.zeros(4, 4)}
    model.load_state_dict(partial, strict=False)  # not all of them
    with pytest.raises(Exception, match="PL484"):
        model(torch.zeros(1, 4))
    model.load_state_dict(Model().state_dict())
    model(torch.zeros(1, 4))
    assert first.done and not model._forward_pre_hooks


def test_nothing_is_hooked_where_nothing_is_compared():
    model = Model()
    watch(model, PassComparison(passes=2))
    assert not model._forward_pre_hooks


def test_a_model_that_is_compiled_as_a_whole_is_left_alone():
    model = Model()
    watch(model, refusing())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1, 4)).shape == (1, 4)
    with pytest.raises(Exception, match="PL484"):
        model(torch.zeros(1, 4))


def test_a_watched_model_can_be_copied():
    model, first = Model(), refusing()
    watch(model, first)
    copied = copy.deepcopy(model)
    with pytest.raises(Exception, match="PL484"):
        copied(torch.zeros(1, 4))


def test_arguments_have_names():
    leaves = leaves_of((1, [2, 3]), {"ids": 4, "nested": {"mask": 5}})
    assert dict(leaves) == {
        "argument 0": 1,
        "argument 1[0]": 2,
        "argument 1[1]": 3,
        "ids": 4,
        "nested['mask']": 5,
    }
