"""Slices of quantized weights are slices of what transformers makes of the whole, bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from planc.runtime.standalone.dequantize import dequantize
from planc.runtime.standalone.safetensors_files import tensors_in_folder

BLOCK = (8, 16)


def fp8(rows, columns, exponents=False):
    """A matrix, a scale for each block of 8 by 16, and their product."""
    values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    grid = -(-rows // BLOCK[0]), -(-columns // BLOCK[1])
    scales = torch.randint(120, 134, grid, dtype=torch.uint8) if exponents else torch.rand(grid)
    factors = (scales.float() - 127).exp2() if exponents else scales
    whole = factors.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    right = values.float() * whole[:rows, :columns]
    return {"a.weight": values, "a.weight_scale_inv": scales}, right


def mxfp4(experts, out, groups):
    blocks = torch.randint(256, (experts, out, groups, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (experts, out, groups), dtype=torch.uint8)
    right = convert_moe_packed_tensors(blocks, scales).float()
    return {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, right


def plain(folder, tensors, how):
    """The one weight of a folder whose values and scales are in different files."""
    for number, (name, value) in enumerate(tensors.items()):
        save_file({name: value}, folder / f"part{number}.safetensors")
    problems = []
    found = dequantize(tensors_in_folder(folder, problems), problems, how, BLOCK)
    return found, problems


CASES = {
    "fp8": ("fp8", lambda: fp8(24, 48)),
    "a smaller last block": ("fp8", lambda: fp8(21, 37)),
    "exponents": ("fp8", lambda: fp8(24, 48, exponents=True)),
    "mxfp4": ("mxfp4", lambda: mxfp4(3, 10, 2)),
}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_slices(case, data, tmp_path_factory):
    how, make = CASES[case]
    tensors, right = make()
    found, problems = plain(tmp_path_factory.mktemp("weights"), tensors, how)
    assert not problems
    [(name, stored)] = found.items()
    assert name in ("a.weight", "e.down_proj") and stored.shape == tuple(right.shape)
    ranges, index = [], []
    for size in right.shape:  # one or two ranges of each dim
        cuts = data.draw(st.lists(st.integers(0, size), min_size=2, max_size=4, unique=True))
        cuts = sorted(cuts)[: len(cuts) // 2 * 2]
        runs = list(zip(cuts[::2], cuts[1::2], strict=True))
        ranges.append(tuple(runs))
        index.append([i for a, b in runs for i in range(a, b)])
    target = torch.empty([len(some) for some in index])
    stored.copy_to(target, ranges)
    expected = right[torch.meshgrid(*map(torch.tensor, index), indexing="ij")]
    assert torch.equal(target, expected)


def test_our_own_reference_is_transformers():
    tensors, right = fp8(24, 48)
    assert torch.equal(Fp8Dequantize(None)._dequantize_one(*tensors.values()), right)


def test_scales_of_other_blocks_are_a_problem(tmp_path):
    tensors, _ = fp8(24, 48)
    tensors["a.weight_scale_inv"] = torch.rand(2, 3)
    _, [problem] = plain(tmp_path, tensors, "fp8")
    assert "[2, 3]" in problem and "[24, 48]" in problem and "a.weight_scale_inv" in problem


def test_scales_of_no_experts_are_a_problem(tmp_path):
    blocks, scales = torch.zeros(4, 2, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    _, [problem] = plain(tmp_path, {"a_blocks": blocks, "a_scales": scales}, "mxfp4")
    assert "a_scales is [4, 2]" in problem


def test_what_is_not_quantized_stays(tmp_path):
    tensors = {"a.weight": torch.rand(3, 4), "b_scales": torch.rand(2)}
    found, problems = plain(tmp_path, tensors, "mxfp4")
    assert found.keys() == tensors.keys() and not problems
