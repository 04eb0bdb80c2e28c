"""Documents of a row: states, convolutions and padding move nothing of another document."""

import ast
import copy
import functools
import inspect
import itertools
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from folders import ROOT
from helpers import sampled, simulated
from torch.nn.functional import cross_entropy, pad
from transformers.integrations import use_kernel_func_from_hub_with_fallback as with_kernel

from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values
from planc.model.own_code import own_code
from planc.model.recurrent_states import UPDATES, state_updates
from planc.proof.small_case import small_model
from planc.proxy.transformers_model import TransformersBuilder, without_cache
from planc.runtime.leaks import leaks
from planc.runtime.standalone import documents
from planc.runtime.standalone.documents import (
    FUSED,
    TOKENS,
    UNMASKED,
    Documents,
    DocumentsError,
    batch_documents,
    kept_apart,
    reset_states,
    running,
)

PAGE = ROOT / "docs" / "how-to" / "packed-documents.md"
MODELS = Path(transformers.__file__).parent / "models"
LIMIT = 1e-5
ROUNDING = {"qwen4_exp_text": 5e-5}
"""1.5e-5 of A_log's gradient in float32, and 1e-13 where all of the model is in float64."""
CUTS = ((0, 47, 48, 110), (0, 70, 71))
LENGTH = 130  # more than two chunks of any of the functions
FAMILIES = [
    *("qwen3_next", "bamba", "mamba", "rwkv", "recurrent_gemma"),
    *("kimi_linear", "bailing_hybrid", "falcon_h1", "falcon_mamba", "granitemoehybrid"),
    *("inkling_text", "jamba", "lfm2", "lfm2_moe", "lfm3"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen4_exp_text", "xlstm", "zamba", "zamba2"),
    *("zaya",),
]


def made(family):
    """A small model of the family's default configuration, and what is reset in it."""
    from planc.model.sources.default_configs import default_config

    values = default_config(family)
    if family == "lfm2":  # its default has no convolution
        values["layer_types"] = ["conv", "full_attention"] * 16
    facts = load_values(values, family, Sink())
    small = small_model(facts).values
    model = TransformersBuilder(small).build(0).train()
    without_cache(model)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    return model, state_updates(facts), (small, facts.name)


def packed(model, cuts=CUTS):
    generator = torch.Generator().manual_seed(3)
    high = model.config.get_text_config().vocab_size
    ids = torch.randint(4, high, (len(cuts), LENGTH), generator=generator)
    positions, labels = torch.zeros_like(ids), ids.clone()
    for row, first, end in pieces(cuts):
        positions[row, first:end] = torch.arange(end - first)
        labels[row, first] = -100
    return ids, positions, labels


def pieces(cuts=CUTS):
    return [
        (row, first, end)
        for row, places in enumerate(cuts)
        for first, end in zip(places, (*places[1:], LENGTH), strict=True)
    ]


def summed(logits, labels):
    shifted = pad(labels, (0, 1), value=-100)[:, 1:]
    return cross_entropy(logits.float().flatten(0, 1), shifted.flatten(), reduction="sum")


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def error(mine, right, least=1e-12):
    return float((mine - right).abs().max() / right.abs().max().clamp_min(least))


def worst(mine, right):
    least = 1e-3 * max(float(g.abs().max()) for g in right.values())
    return max(error(mine[name], grad, least) for name, grad in right.items())


def alone(model, ids, labels, cuts=CUTS):
    """The logits and gradients of documents that are run by themselves."""
    found = []
    for row, first, end in pieces(cuts):
        logits = model(input_ids=ids[row : row + 1, first:end]).logits
        summed(logits, labels[row : row + 1, first:end]).backward()
        found.append(logits.detach()[0])
    return torch.cat(found).view(len(cuts), LENGTH, -1), gradients(model)


@pytest.mark.parametrize("family", sampled(FAMILIES, 5))
def test_documents_of_every_family_are_those_alone(family):
    """Recomputed, too; and without the resets they are not."""
    model, parts, _ = made(family)
    assert parts
    ids, positions, labels = packed(model)
    logits, right = alone(model, ids, labels)
    with torch.no_grad():
        assert error(model(input_ids=ids, position_ids=positions).logits, logits) > 1e-3
    reset_states(model, *parts)
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            model.__dict__[documents.RESETS].replaced = False
        output = model(input_ids=ids, position_ids=positions).logits
        summed(output, labels).backward()
        assert error(output, logits) < LIMIT
        assert worst(gradients(model), right) < ROUNDING.get(family, LIMIT)


@pytest.mark.parametrize("family", ["rwkv", "recurrent_gemma", "xlstm", "bamba"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_nothing(family, side):
    """Logits and gradients are those of the rows without padding."""
    model, parts, _ = made(family)
    ids, _, labels = packed(model)
    pads = (40, 3)
    shown = [slice(n, None) if side == "left" else slice(0, LENGTH - n) for n in pads]
    mask = torch.zeros_like(ids)
    found = []
    for row, some in enumerate(shown):
        mask[row, some] = 1
        found.append(model(input_ids=ids[row : row + 1, some]).logits)
        summed(found[-1], labels[row : row + 1, some]).backward()
    right = gradients(model)
    reset_states(model, *parts)
    output = model(input_ids=ids, attention_mask=mask).logits
    sum(
        summed(output[row : row + 1, some], labels[row : row + 1, some])
        for row, some in enumerate(shown)
    ).backward()
    for row, some in enumerate(shown):
        assert error(output[row, some], found[row][0].detach()) < LIMIT
    assert worst(gradients(model), right) < LIMIT


def test_each_pass_is_recomputed_with_its_own_documents():
    """Two passes, one backward pass; a third, of one document a row, between."""
    model, parts, _ = made("bamba")
    cuts = ((0, 20), (0, 64, 65))
    every = [(packed(model), CUTS), (packed(model, cuts), cuts)]
    rights = [alone(model, ids, labels, where)[1] for (ids, _, labels), where in every]
    reset_states(model, *parts)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    losses = [
        summed(model(input_ids=ids, position_ids=positions).logits, labels)
        for (ids, positions, labels), _ in every
    ]
    model(input_ids=every[0][0][0])
    sum(losses).backward()
    right = {name: grad + rights[1][name] for name, grad in rights[0].items()}
    assert worst(gradients(model), right) < LIMIT


@pytest.mark.parametrize("family", ["zaya", "bamba"])
def test_a_copy_has_its_own_weights(family):
    """As an average of the weights has; and keeps its documents apart."""
    model, parts, _ = made(family)
    ids, positions, labels = packed(model)
    logits, _ = alone(model, ids, labels)
    reset_states(model, *parts)
    model(input_ids=ids, position_ids=positions)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert error(other(input_ids=ids, position_ids=positions).logits, logits) < LIMIT


@pytest.mark.parametrize("stated", ["seq_idx", "cu_seq_lens_q", "cu_seqlens", "padded", "both"])
def test_documents_that_are_stated_otherwise(stated):
    """For kernels; without positions, which then begin again with each."""
    model, parts, _ = made("qwen3_next")
    ids, positions, labels = packed(model)
    logits, _ = alone(model, ids, labels)
    numbers = positions.eq(0).cumsum(-1).int() - 1
    starts = positions.flatten().eq(0).nonzero()[:, 0].int()
    lengths = torch.cat([starts, starts.new_tensor([ids.numel()])])
    given = {
        "seq_idx": {"seq_idx": numbers},
        "both": {"seq_idx": numbers, "position_ids": positions, "use_cache": True},
        "padded": {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths},
    }.get(stated, {stated: lengths})
    reset_states(model, *parts)
    with torch.no_grad():
        assert error(model(input_ids=ids, **given).logits, logits) < LIMIT


def test_documents_that_are_stated_in_two_ways_are_refused():
    ids, numbers = torch.ones(1, 6), torch.tensor([[0, 0, 0, 1, 1, 1]])
    again = torch.arange(6)[None] % 3
    whole = {"input_ids": ids, "position_ids": torch.arange(6)[None]}
    assert batch_documents({"input_ids": ids, "position_ids": again, "seq_idx": numbers})
    for other in ({"seq_idx": numbers}, {"cu_seq_lens_q": torch.tensor([0, 3, 6])}):
        with pytest.raises(DocumentsError, match="begin documents at other tokens"):
            batch_documents({**whole, **other})
        with pytest.raises(DocumentsError, match="leave it out"):
            batch_documents({**other, "input_ids": ids, "attention_mask": torch.ones(1, 6)})
    one = {"seq_idx": 0 * numbers, "attention_mask": torch.ones(1, 6)}
    assert batch_documents({"input_ids": ids, **one}) is None


def test_what_is_one_document_is_left_alone():
    ids, mask = torch.ones(2, 6), torch.ones(2, 6)
    positions = torch.arange(6).expand(2, -1)
    again = positions % 3
    assert batch_documents({"input_ids": ids, "position_ids": positions}) is None
    assert batch_documents({"input_ids": ids}) is None
    assert batch_documents({"input_ids": ids, "attention_mask": mask}, masks=True) is None
    # attention does not tell documents apart where a mask is given
    assert batch_documents({"position_ids": again, "attention_mask": mask}) is None
    found = batch_documents({"input_ids": ids, "position_ids": again[:1]})
    assert found.numbers.tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    assert torch.equal(found.positions, again)
    text = torch.stack([again] * 4)  # with those of images after it
    assert torch.equal(batch_documents({"position_ids": text}).begins, found.begins)


def test_rows_of_documents_are_padded_by_at_most_as_many_tokens():
    generator = torch.Generator().manual_seed(0)
    for share in (0.001, 0.01, 0.1, 0.5, 1.0):
        found = Documents(torch.rand((3, 1000), generator=generator) < share)
        assert sum(group.numel() for group in found.groups) < 2 * 3000
        value = torch.rand(3, 5, 1000, generator=generator)
        assert torch.equal(found.run_per_document(lambda given: given, 2, (value,), {}), value)


# Kernels, which this machine has not: what they are told, and that their answers are used ---------


def kernel_of(name, package, function, kernel, monkeypatch):
    """transformers' function with a kernel that is "installed"."""
    home = types.ModuleType(package)
    monkeypatch.setitem(sys.modules, package, home)
    setattr(home, name, kernel)
    return with_kernel(name, package)(function)


def test_a_kernel_that_takes_lengths_is_told_them(monkeypatch):
    from transformers.models.qwen3_next import modeling_qwen3_next as home

    told = []

    def chunk_gated_delta_rule(
        query, key, value, g, beta, cu_seqlens=None, use_qk_l2norm_in_kernel=False
    ):
        told.append(cu_seqlens.tolist())
        assert len(query) == 1  # what fla demands where it is told lengths
        norm = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        given = (query, key, value, g, beta)
        parts = [
            plain(*(t[:, first:end] for t in given), **norm)
            for first, end in itertools.pairwise(told[-1])
        ]
        return torch.cat([output for output, _ in parts], 1), None

    model, parts, _ = made("qwen3_next")
    ids, positions, labels = packed(model)
    logits, right = alone(model, ids, labels)
    plain = inspect.unwrap(home.torch_chunk_gated_delta_rule)  # of torch alone
    wrapped = kernel_of(
        "chunk_gated_delta_rule", "an_fla", plain, chunk_gated_delta_rule, monkeypatch
    )
    monkeypatch.setattr(home, "torch_chunk_gated_delta_rule", wrapped)
    reset_states(model, *parts)
    output = model(input_ids=ids, position_ids=positions).logits
    summed(output, labels).backward()
    assert error(output, logits) < LIMIT and worst(gradients(model), right) < LIMIT
    starts = positions.flatten().eq(0).nonzero()[:, 0].tolist()
    assert told and all(one == [*starts, ids.numel()] for one in told)


def test_a_kernel_that_takes_numbers_is_told_them(monkeypatch):
    told = []

    def mamba_chunk_scan_combined(x, dt, seq_idx=None):
        told.append(seq_idx)
        return x + dt[..., None]

    def plain(x, dt):
        raise AssertionError("the kernel is there")

    given = "mamba_chunk_scan_combined", "a_mamba_ssm", plain, mamba_chunk_scan_combined
    function = kept_apart(kernel_of(*given, monkeypatch), "mamba2_chunk_scan")
    x, dt = torch.rand(1, 6, 2, 2), torch.rand(1, 6, 2)
    found = batch_documents({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])})
    with running(found):
        assert torch.equal(function(x, dt, seq_idx=None), x + dt[..., None])
    assert found.kept
    assert told[0].dtype == torch.int32 and told[0].tolist() == [[0, 0, 0, 1, 1, 2]]
    function(x, dt)
    assert told[1] is None


def test_a_fused_kernel_that_takes_neither_is_not_called(monkeypatch):
    """The model then calls the convolution and the scan by themselves."""
    given = "mamba_inner_fn", "a_mamba_ssm", lambda x: None, lambda x: x
    function = kept_apart(kernel_of(*given, monkeypatch), "mamba_inner_fn")
    assert function(3) == 3
    with running(batch_documents({"position_ids": torch.tensor([[0, 1, 0]])})):
        assert function(3) is None


class Adapted(torch.nn.Module):
    """A linear layer with something added to it, as an adapter is."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.base(x) * self.factor


@pytest.mark.parametrize("changed", [False, True])
def test_a_fused_kernel_does_not_pass_by_what_a_plan_changed(changed, monkeypatch):
    """It takes the weights of `out_proj`: an adapter there would get no gradient, in silence."""
    from transformers.models.bamba import modeling_bamba as home

    called = []

    def mamba_split_conv1d_scan_combined(zxbcdt, *_, outproj_weight=None, **__):
        called.append(outproj_weight)
        return zxbcdt[..., : len(outproj_weight)] * 1.0

    plain = inspect.unwrap(home.mamba2_split_conv1d_scan_combined)
    given = "mamba_split_conv1d_scan_combined", "a_mamba_ssm", plain
    kernel = kernel_of(*given, mamba_split_conv1d_scan_combined, monkeypatch)
    monkeypatch.setattr(home, "mamba2_split_conv1d_scan_combined", kernel)
    model, parts, _ = made("bamba")
    mixers = [m for m in model.modules() if type(m).__name__ == "BambaMixer"]
    if changed:
        for mixer in mixers:
            mixer.out_proj = Adapted(mixer.out_proj)
    reset_states(model, *parts)
    model(input_ids=packed(model)[0]).logits.sum().backward()
    if changed:
        assert not called and all(m.out_proj.factor.grad is not None for m in mixers)
    else:
        assert len(called) == len(mixers)


def test_a_layer_of_another_function_is_refused():
    """As a kernel of a whole layer, which is not told where documents begin."""
    model, parts, _ = made("bamba")
    ids, positions, _ = packed(model)
    mixers = [m for m in model.modules() if type(m).__name__ == "BambaMixer"]
    for mixer in mixers:
        mixer.forward = lambda hidden_states, **_: hidden_states
    reset_states(model, *parts)
    model(input_ids=ids)
    with pytest.raises(DocumentsError, match="not told where documents begin"):
        model(input_ids=ids, position_ids=positions)


def test_tokens_that_are_parts_are_refused():
    found = batch_documents({"position_ids": torch.tensor([[0, 1, 2, 0]])})
    function = kept_apart(lambda x: x, "mamba2_chunk_scan")
    with running(found), pytest.raises(DocumentsError, match="other tokens than the model"):
        function(torch.rand(1, 2, 3))


def test_the_code_that_runs_is_that_of_the_library():
    """For a model that is applied after another one was reset."""
    model, parts, _ = made("bamba")
    fresh = copy.deepcopy(model)
    ids, positions, _ = packed(model)
    before = own_code(fresh)
    reset_states(model, *parts)
    model(input_ids=ids, position_ids=positions)
    assert own_code(fresh) == before and not before


@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "rwkv"])
def test_a_part_that_is_not_reset_is_found(family, uncached):
    _, parts, (values, name) = made(family)
    assert leaks(values, name, parts) == {}
    for part in parts:
        assert "documents" in leaks(values, name, [p for p in parts if p != part])


def test_a_check_that_leaves_one_out_says_it(uncached, monkeypatch):
    _, found = simulated("bamba-9b", "bamba", ["tp=2"], world=2)
    assert "PL517" not in [d.code for d in found]
    monkeypatch.setitem(UPDATES, "BambaMixer", ("causal_conv1d_fn",))
    _, found = simulated("bamba-9b", "bamba", ["tp=2"], world=2)
    assert [d.severity for d in found if d.code == "PL517"] == ["info"]


# The tables ---------------------------------------------------------------------------------------

REFUSED = {
    "deepseek_v4": "refused: its keys are made of several tokens each, whatever their document",
}
CALLED = {name for name in TOKENS if "." not in name} | {*FUSED}


def calling(folder):
    """The classes of a family's file that call the functions, and whether it has states."""
    tree = ast.parse(next(folder.glob("modeling_*.py")).read_text())
    classes = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    called = {
        name: {
            n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and hasattr(n.func, "id")
        }
        for name, node in classes.items()
    }
    stateful = any(
        isinstance(n, ast.Assign) and ast.unparse(n) == "_is_stateful = True"
        for n in ast.walk(tree)
    )
    return (
        {n: names & CALLED for n, names in called.items() if names & CALLED},
        [*classes],
        stateful,
    )


@functools.cache
def families():
    """(family, what is reset, whether it has states) of every file of transformers with either."""
    found = []
    for folder in sorted(p for p in MODELS.iterdir() if [*p.glob("modeling_*.py")]):
        called, classes, stateful = calling(folder)
        parts = sorted({part for kind in classes for part in UPDATES.get(kind, ())})
        if called or parts or stateful:
            found.append((folder.name, parts, called, stateful))
    return tuple(found)


@pytest.mark.slow
def test_every_class_that_calls_such_a_function_is_known():
    seen = set()
    for family, _, called, _ in families():
        for kind, names in called.items():
            assert {*UPDATES[kind]} >= names - {*FUSED}, (family, kind)
            seen |= {*UPDATES[kind]}
    assert {part for parts in UPDATES.values() for part in parts} == {*TOKENS}
    assert {name for name in TOKENS if "." not in name} <= seen and {*UNMASKED} <= {*TOKENS}


HOW = {
    "causal_conv1d_fn": "convolution",
    "chunk_kimi_delta_attention": "delta rule (KDA)",
    "mamba2_chunk_scan": "scan (Mamba 2)",
    "mamba_selective_scan": "scan (Mamba 1)",
    "rwkv_linear_attention": "WKV",
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "MiniMaxLightningAttention.forward": "lightning attention, the whole module",
    "RecurrentGemmaRecurrentBlock.conv_1d": "convolution",
    "RecurrentGemmaRglru._rnn_scan": "RG-LRU",
    "RwkvFeedForward.time_shift": "shift by a token",
    "RwkvSelfAttention.time_shift": "shift by a token",
    "ZayaCCAProjection.forward": "convolutions and delayed values, the whole module",
    "xLSTMBackend.forward": "mLSTM",
}
TOLD = {
    "causal_conv1d_fn": "`seq_idx`",
    "chunk_kimi_delta_attention": "`cu_seqlens`",
    "mamba2_chunk_scan": "`seq_idx`",
    "torch_chunk_gated_delta_rule": "`cu_seqlens`",
}


def line_of(family, parts):
    if not parts:
        return f"| {family} | {REFUSED.get(family, 'its text model is of another family')} | | |"
    names = list(dict.fromkeys(HOW[part] for part in parts))
    if not {family, f"{family}_text"} & {*FAMILIES}:
        names.append("not run: planc builds no proxy model of it")
    told = sorted({TOLD[part] for part in parts if part in TOLD})
    padding = "separate" if {*parts} & {*UNMASKED} else "by the model"
    return f"| {family} | {', '.join(names)} | {', '.join(told) or '-'} | {padding} |"


def test_the_table_of_the_page(request):
    """`pytest --update` writes it."""
    head = "| family | runs on each document separately | kernel argument | padding |"
    rows = [line_of(family, parts) for family, parts, _, _ in families()]
    made = "\n".join([head, "| --- | --- | --- | --- |", *rows])
    text = PAGE.read_text()
    before, _, rest = text.partition(head)
    after = rest[rest.index("\n\n") :]
    if request.config.getoption("--update"):
        PAGE.write_text(before + made + after)
    assert PAGE.read_text() == before + made + after, "run pytest --update and read it"
    kept = {family for family, parts, _, stateful in families() if stateful and not parts}
    others = kept - REFUSED.keys()
    assert len([1 for _, parts, _, stateful in families() if parts]) >= 23
    assert others == {
        "minicpm_ocr",
        "minicpmv4_6",
        "minicpmv4_7",
        "nemotron3_5_transcribe",
        "nemotron_h_omni",
    }
