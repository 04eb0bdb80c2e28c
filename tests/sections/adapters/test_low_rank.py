"""The weight of experts with factors: products are those with the sum, which none of them makes."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from planc.runtime.standalone.lora_experts import LowRank, add_factors  # noqa: E402
from planc.runtime.standalone.lora_init import as_in_peft, of_experts  # noqa: E402

EXPERTS, HIGH, WIDE, RANK = 3, 8, 16, 5
TOKENS = torch.randn(6, WIDE, generator=torch.Generator().manual_seed(1))
OFFSETS = torch.tensor([2, 2, 6], dtype=torch.int32)  # the second expert has no token


def weight(**dtype):
    made = torch.Generator().manual_seed(0)
    shapes = (EXPERTS, HIGH, WIDE), (EXPERTS, HIGH, RANK), (EXPERTS, WIDE, RANK)
    base, rows, columns = (torch.randn(s, generator=made).to(**dtype) for s in shapes)
    return LowRank(base, rows.requires_grad_(), columns.requires_grad_(), 0.5)


PRODUCTS = {
    "linear": lambda w: functional.linear(TOKENS, w[1]),
    "linear with a bias": lambda w: functional.linear(TOKENS, w[1], torch.ones(HIGH)),
    "matmul": lambda w: TOKENS @ w[2].mT,
    "weight first": lambda w: w[2] @ TOKENS.T,
    "bmm": lambda w: torch.bmm(TOKENS.expand(EXPERTS, 6, WIDE), w.transpose(1, 2)),
    "bmm of chosen experts": lambda w: torch.bmm(
        w[torch.tensor([0, 2, 2, 1, 0, 1])], TOKENS.unsqueeze(-1)
    ),
    "grouped": lambda w: torch._grouped_mm(TOKENS, w.transpose(-2, -1), offs=OFFSETS),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_is_that_with_the_sum(product, monkeypatch):
    changed = weight()
    dense = changed.dense()
    wanted = PRODUCTS[product](dense)
    slope = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    right = torch.autograd.grad(wanted, (changed.rows, changed.columns), slope)
    monkeypatch.setattr(LowRank, "dense", lambda _: pytest.fail("the sum was made"))
    found = PRODUCTS[product](changed)
    mine = torch.autograd.grad(found, (changed.rows, changed.columns), slope)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "other",
    [
        lambda w: torch.einsum("eoi,ti->eto", w, TOKENS),
        lambda w: TOKENS[:1] * w[0],
        lambda w: w[:, :2],
        lambda w: w.flatten(),
        lambda w: w.transpose(0, 1),
    ],
)
def test_all_else_has_the_sum(other):
    changed = weight()
    torch.testing.assert_close(other(changed), other(changed.dense()))


def test_what_is_asked_of_a_weight():
    changed = weight(dtype=torch.bfloat16)
    assert (changed.shape, changed.dtype, len(changed)) == ((3, 8, 16), torch.bfloat16, EXPERTS)
    assert changed[0].shape == (HIGH, WIDE) and changed.mT.shape == (EXPERTS, WIDE, HIGH)


def test_shapes_of_peft_and_back():
    a, b = torch.randn(EXPERTS, WIDE, RANK), torch.randn(EXPERTS, HIGH, RANK)
    one, two = as_in_peft(a, b)
    assert one.shape == (EXPERTS * RANK, WIDE) and two.shape == (HIGH, RANK * EXPERTS)
    # A is expert by expert, and B rank by rank
    assert torch.equal(one[RANK], a[1, :, 0]) and torch.equal(two[:, 1], b[1, :, 0])
    assert all(map(torch.equal, of_experts(one, two, EXPERTS), (a, b)))


@pytest.mark.parametrize("transposed", [False, True])
def test_factors_of_a_module(transposed):
    module = torch.nn.Module()
    module.up = torch.nn.Parameter(torch.randn(EXPERTS, HIGH, WIDE))
    module.is_transposed = transposed
    module.forward = lambda: module.up
    add_factors(module, ["up"], RANK, 2.0, torch.float64)
    a, b = module.up_lora_A, module.up_lora_B
    assert a.shape[1] == (HIGH if transposed else WIDE) and a.dtype == torch.float64
    with torch.no_grad():
        a.normal_(), b.normal_()
    inside = module.forward()
    change = (a @ b.mT if transposed else b @ a.mT).float() * 2
    torch.testing.assert_close(inside.dense(), module.up + change)
    assert isinstance(module.up, torch.nn.Parameter)  # its forward alone has the factors
