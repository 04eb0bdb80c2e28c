"""Context parallelism: parts of sequences on threads as ranks, beside whole ones in one process."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from helpers import compiled_of, simulated, simulated_case
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import causal_mask_function

from planc.diagnostics.diagnostic import PlanError, Sink
from planc.emit.python.script import render
from planc.files.resources import PLANS
from planc.ops.context import ContextParallel
from planc.ops.document import digest
from planc.ops.lowered import Lowered
from planc.proof.layout_flow import flow
from planc.runtime.executor import apply_lowered
from planc.runtime.standalone import (
    collectives,
    context_blocks,
    context_exchange,
    context_positions,
    context_ring,
    context_rows,
    context_tokens,
)
from planc.runtime.standalone import context as parallel
from planc.runtime.standalone.context_tokens import ContextError, part_of_batch
from planc.simulate.random_numbers import RankRandom
from planc.simulate.simulate import simulate
from planc.simulate.thread_ranks import run_ranks

LENGTH, VOCABULARY = 24, 128

PLAN = """plan t for llama, mistral, gemma3_text, opt, qwen3, phi3, roberta, bart, \
llama4_text, deepseek_v32, gemma2, gpt_oss, deepseek_v3

option attention = "all_gather"
option balance   = "head_tail"

mesh {
    dp_shard = auto
    cp       = 2
    tp       = 1
}

context on cp {
    attention = attention
    balance   = balance
}

checkpoint {
    optional model.layers.* : full
}

fsdp on dp_shard * cp {
    root : unit
}
"""

NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
FAMILIES = {
    "llama": {},
    "gemma2": dict(sliding_window=6, attn_implementation="eager"),  # soft caps
    "gemma3_text": dict(sliding_window=6),
    "gpt_oss": dict(sliding_window=6, num_local_experts=4),  # sinks
    "deepseek_v3": dict(  # keys and values of different widths
        num_key_value_heads=4,
        head_dim=8,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}
OWN = {
    "opt": dict(ffn_dim=96, word_embed_proj_dim=64, dropout=0.0),  # positions from the mask
    "roberta": dict(pad_token_id=1, **NO_DROPOUT),  # positions from the ids, keys of both sides
    "bart": dict(  # takes no positions, and its loss is a mean over its labels
        d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, dropout=0.0
    ),
    "llama4_text": dict(  # chunks after the padding, queries scaled by the index of their tokens
        attention_chunk_size=6,
        floor_scale=4,
        no_rope_layers=[1, 0],
        num_local_experts=4,
        intermediate_size_mlp=96,
    ),
    "deepseek_v32": dict(  # an indexer chooses the keys of each query
        FAMILIES["deepseek_v3"],
        index_n_heads=16,
        index_topk=6,
        index_head_dim=16,
        attn_implementation="eager",
    ),
}
"""What the code of models knows of tokens beside attention."""


def small(family="llama", **changes):
    """A small model with weights that are nowhere 0 or 1."""
    values = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        use_cache=False,
        pad_token_id=None,
    )
    own = FAMILIES.get(family) or OWN.get(family, {})
    config = AutoConfig.for_model(family, **{**values, **own, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def batch(kind="plain", part=1):
    """Two rows; labels are ignored unevenly, and there is padding, or there are two documents."""
    torch.manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (2, LENGTH))
    labels = ids.clone()
    labels[0, : LENGTH - 5] = -100
    made = {"input_ids": ids, "labels": labels}
    if kind == "late labels":
        labels[1, : LENGTH - 5] = -100
    if kind == "padding":
        mask = made["attention_mask"] = torch.ones_like(ids)
        mask[0, :3] = mask[1, -2:] = 0
        ids[mask == 0] = 1  # the padding token of some models
    if kind == "packed":
        first = (LENGTH // 3) // part * part
        positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
        made["position_ids"] = positions.expand(2, -1).contiguous()
    return made


def error(mine, right):
    return float((mine - right).abs().max() / right.abs().max().clamp_min(1e-3))


def compared(family, ranks, attention, balance, kind, *, counted=True, layers=(), **settings):
    """The largest errors of logits, loss and gradients.

    Args:
        counted: whether the model is given the number of labels; else it takes the mean over them.
        layers: of some blocks, what their attention exchanges.
        settings: of context parallelism.
    """
    heads = {"num_key_value_heads": 4} if layers else {}
    single, whole = small(family, **heads), batch(kind, 2 * ranks)
    models = [copy.deepcopy(single) for _ in range(ranks)]
    valid = (whole["labels"][:, 1:] != -100).sum()
    given = {"num_items_in_batch": valid} if counted else {}
    right = single(**whole, **given)
    right.loss.backward()
    errors = []

    def rank(number):
        mesh, model = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), models[number]
        parallel.context_parallel(model, mesh, attention=attention, balance=balance, **settings)
        for block, exchange in layers:
            parallel.attend_by([model.model.layers[block]], mesh, **exchange)
        part = model.context_parallel.batch(whole)
        index = model.context_parallel.batch({**whole, "input_ids": indices()})["input_ids"]
        output = model(**part, **given)
        share = output.loss if counted else output.loss / ranks
        share.backward()
        loss = share.detach().clone()
        distributed.all_reduce(loss)
        for parameter in (p for p in model.parameters() if p.grad is not None):
            distributed.all_reduce(parameter.grad)
        wanted = right.logits[torch.arange(2)[:, None], index]
        seen = part.get("attention_mask", torch.ones_like(index)).bool()  # rows of padding differ
        errors.append(error(output.logits[seen], wanted[seen]))
        errors.append(error(loss, right.loss))
        pairs = zip(model.parameters(), single.parameters(), strict=True)
        errors.extend(error(mine.grad, p.grad) for mine, p in pairs if p.grad is not None)

    assert run_ranks(ranks, rank, seconds=120) is None
    return max(errors)


def indices():
    return torch.arange(LENGTH).expand(2, -1)


@pytest.mark.parametrize("kind", ["plain", "padding", "packed"])
@pytest.mark.parametrize("balance", ["none", "head_tail", "per_document"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_keys_and_values_of_all_ranks(ranks, balance, kind):
    assert compared("llama", ranks, "all_gather", balance, kind) < 5e-6


@pytest.mark.parametrize("kind", ["plain", "padding", "packed"])
@pytest.mark.parametrize("balance", ["none", "head_tail", "per_document"])
def test_heads_for_tokens(balance, kind):
    assert compared("llama", 2, "ulysses", balance, kind) < 5e-6


@pytest.mark.parametrize("kind", ["plain", "padding", "packed"])
@pytest.mark.parametrize("balance", ["none", "head_tail", "per_document"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_keys_and_values_go_around(ranks, balance, kind):
    assert compared("llama", ranks, "ring", balance, kind) < 5e-6


@pytest.mark.parametrize("kind", ["plain", "padding", "packed"])
@pytest.mark.parametrize("balance", ["none", "head_tail", "per_document"])
@pytest.mark.parametrize("attention", ["all_gather", "ring"])
def test_heads_for_tokens_among_neighbours(attention, balance, kind):
    """And keys and values of those from the others."""
    assert compared("llama", 4, attention, balance, kind, ulysses=2) < 5e-6


@pytest.mark.parametrize("attention", ["all_gather", "ring"])
@pytest.mark.parametrize("family", list(FAMILIES)[1:])
def test_families_whose_neighbours_exchange_heads(family, attention):
    kinds = ("padding", "packed") if family != "gpt_oss" else ("padding",)
    for kind in kinds:
        assert compared(family, 4, attention, "head_tail", kind, ulysses=2) < 2e-5


CHOICES = {
    "a ring, and one that gathers": ("ring", [(1, {"attention": "all_gather"})]),
    "gathered, and one with all heads": ("all_gather", [(0, {"attention": "ulysses"})]),
    "heads, and a ring of half": ("ulysses", [(1, {"attention": "ring", "ulysses": 2})]),
}


@pytest.mark.parametrize("kind", ["plain", "padding", "packed"])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("choice", CHOICES)
def test_layers_that_exchange_otherwise(choice, family, kind):
    attention, layers = CHOICES[choice]
    kind = "padding" if family == "gpt_oss" else kind
    assert compared(family, 4, attention, "head_tail", kind, layers=layers) < 2e-5


def others_of_the_first(monkeypatch):
    plain = context_exchange.KeyExchange.__init__

    def first(self, *args):
        plain(self, *args)
        self.rank = 0

    monkeypatch.setattr(context_exchange.KeyExchange, "__init__", first)


def keys_of_neighbours_alone(monkeypatch):
    monkeypatch.setattr(
        context_exchange.KeyExchange, "gather_tokens", lambda _, part: torch.cat([part] * 2, 2)
    )


def groups_that_change_places(monkeypatch):
    plain = context_exchange.KeyExchange.__init__

    def turned(self, *args):
        plain(self, *args)
        self.groups = self.groups[::-1]

    monkeypatch.setattr(context_exchange.KeyExchange, "__init__", turned)


def sinks_of_the_first(monkeypatch):
    monkeypatch.setattr(
        context_exchange.KeyExchange, "heads_of", lambda self, v: v[: len(v) // self.heads]
    )


@pytest.mark.parametrize(
    "fault",
    [
        others_of_the_first,
        keys_of_neighbours_alone,
        groups_that_change_places,
        sinks_of_the_first,
    ],
)
def test_faults_among_neighbours_show(fault, monkeypatch):
    fault(monkeypatch)
    assert compared("gpt_oss", 4, "all_gather", "head_tail", "padding", ulysses=2) > 1e-2


def test_neighbours_that_do_not_divide_the_ranks():
    with pytest.raises(AssertionError, match="4 ranks of the context axis are not divisible by 3"):
        compared("llama", 4, "ring", "none", "plain", ulysses=3)


@pytest.mark.parametrize("kind", ["plain", "padding", "packed"])
@pytest.mark.parametrize("attention", ["all_gather", "ring"])
@pytest.mark.parametrize("family", list(FAMILIES)[1:])
def test_attention_of_families(family, attention, kind):
    """Windows, soft caps, sinks, and values of another width than keys."""
    assert compared(family, 2, attention, "head_tail", kind) < 5e-6


@pytest.mark.parametrize("attention", ["all_gather", "ring"])
@pytest.mark.parametrize("family", ["gpt_oss", "opt", "roberta"])
def test_documents_that_the_model_does_not_tell_apart(family, attention):
    assert compared(family, 3, attention, "per_document", "packed") < 5e-6


@pytest.mark.parametrize("kind", ["plain", "padding", "packed"])
@pytest.mark.parametrize("balance", ["none", "head_tail"])
@pytest.mark.parametrize(
    ("family", "attention"),
    [*((name, "all_gather") for name in OWN if name != "bart"), ("deepseek_v32", "ring")],
)
def test_what_the_code_of_models_counts(family, attention, balance, kind):
    assert compared(family, 2, attention, balance, kind) < 5e-6


@pytest.mark.parametrize("kind", ["padding", "packed"])
def test_chosen_keys_in_small_tiles(kind, monkeypatch):
    """Of three ranks, whose tiles have some chosen keys, all or none."""
    monkeypatch.setattr(context_ring, "TILE", 3)
    assert compared("deepseek_v32", 3, "ring", "head_tail", kind) < 5e-6
    sdpa = {**OWN["deepseek_v32"], "attn_implementation": "sdpa"}
    monkeypatch.setitem(OWN, "deepseek_v32", sdpa)
    assert compared("deepseek_v32", 3, "ring", "none", kind) < 5e-6


@pytest.mark.parametrize("kind", ["plain", "padding"])
@pytest.mark.parametrize("balance", ["none", "head_tail", "per_document"])
def test_a_model_that_takes_no_positions(balance, kind):
    assert compared("bart", 2, "all_gather", balance, kind, counted=False) < 5e-6


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("family", ["roberta", "llama4_text"])
def test_exchanges_of_models_that_count(family, attention):
    assert compared(family, 2, attention, "per_document", "padding") < 5e-6


@pytest.mark.parametrize(
    ("family", "attention", "balance", "kind", "said"),
    [
        ("bart", "all_gather", "none", "packed", "takes no `position_ids`"),
        ("llama4_text", "all_gather", "per_document", "packed", "counts the tokens of a row"),
        ("deepseek_v32", "ulysses", "none", "plain", "an indexer chooses keys"),
    ],
)
def test_what_models_cannot_count(family, attention, balance, kind, said):
    with pytest.raises(AssertionError, match=said):
        compared(family, 2, attention, balance, kind)


@pytest.mark.parametrize("balance", ["none", "head_tail"])
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_a_mean_over_labels_of_which_ranks_have_unlike_numbers(family, balance):
    """With `none` the first rank has no label."""
    assert compared(family, 3, "all_gather", balance, "late labels", counted=False) < 5e-6


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_queries_that_see_no_key(family):
    """Padding on the left: `sdpa` gives zeros, `eager` the mean of all values."""
    single, whole, found = small(family), batch("padding"), {}

    def logits(attention):
        models = [copy.deepcopy(single) for _ in range(2)]

        def rank(number):
            mesh, model = init_device_mesh("cpu", (2,)), models[number]
            parallel.context_parallel(model, mesh, attention=attention, balance="head_tail")
            part = model.context_parallel.batch(whole)
            assert number or not part["attention_mask"][0, :3].any()
            found[attention, number] = model(**part).logits.detach()

        assert run_ranks(2, rank, seconds=120) is None

    logits("all_gather")
    logits("ring")
    for number in range(2):
        assert error(found["ring", number], found["all_gather", number]) < 5e-6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"block_indices": torch.zeros(1)}, "gives its attention `block_indices`"),
        ({"output_attentions": True}, "gives its attention `output_attentions`"),
    ],
)
def test_what_a_ring_does_not_have(given, said):
    with pytest.raises(ContextError, match=said):
        context_ring.ring_attention(small(), (torch.ones(1, 1, 2, 2),) * 3, None, None, given)


@pytest.mark.parametrize("recomputed", [False, True])
def test_dropped_weights_are_those_of_whole_rows_that_drop_the_same(recomputed, monkeypatch):
    """What the tiles of four ranks drew is put together, and a single process drops just that."""
    single, whole, ranks = small(num_hidden_layers=1, attention_dropout=0.3), batch(), 4
    models = [copy.deepcopy(single) for _ in range(ranks)]
    monkeypatch.setattr(context_ring, "TILE", 3)
    tile, drawn, found = context_ring.TileDropout.tile, {}, {}

    def noted(dropout, *place):
        drop = tile(dropout, *place)

        def wrapped(weights):
            kept = drop(torch.ones_like(weights))
            before = drawn.setdefault((distributed.get_rank(), *place), kept)
            assert torch.equal(before, kept)  # the backward pass draws them again
            return drop(weights)

        return wrapped

    monkeypatch.setattr(context_ring.TileDropout, "tile", noted)

    def rank(number):
        mesh, model = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), models[number]
        if recomputed:
            model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
        parallel.context_parallel(model, mesh, attention="ring", balance="none")
        torch.manual_seed(number)
        with RankRandom():
            output = model(**model.context_parallel.batch(whole))
            output.logits.square().sum().backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
        found[number] = output.logits.detach()

    assert run_ranks(ranks, rank, seconds=120) is None
    own = LENGTH // ranks
    kept = torch.zeros(2, 4, LENGTH, LENGTH)
    for (number, owner, query, key), some in drawn.items():
        at, to = number * own + query, owner * own + key
        kept[:, :, at : at + some.shape[2], to : to + some.shape[3]] = some
    dropped = float((kept == 0).float().tril().sum() / torch.ones_like(kept).tril().sum())
    assert abs(dropped - 0.3) < 0.03
    assert kept[kept > 0].unique().tolist() == pytest.approx([1 / 0.7])
    assert len({tuple(some.flatten().tolist()) for some in drawn.values()}) == len(drawn) > 20
    single.set_attn_implementation("eager")
    monkeypatch.setattr(nn.functional, "dropout", lambda x, p, training: x * kept)
    right = single(**whole)
    right.logits.square().sum().backward()
    assert error(torch.cat([found[n] for n in range(ranks)], 1), right.logits) < 5e-6
    for mine, wanted in zip(models[0].parameters(), single.parameters(), strict=True):
        assert error(mine.grad, wanted.grad) < 2e-5


def test_half_precision_is_summed_in_float32():
    """The merged tiles of a ring are as near to the exact attention as `sdpa` of whole rows."""
    config = dict(num_hidden_layers=1)
    single, whole = small("llama", **config), batch()
    exact = single(**whole).logits.detach()
    halves = {True: single.to(torch.bfloat16)(**whole).logits.detach()}
    models, found = [copy.deepcopy(single) for _ in range(4)], {}

    def rank(number):
        mesh, model = init_device_mesh("cpu", (4,)), models[number]
        parallel.context_parallel(model, mesh, attention="ring", balance="none")
        output = model(**model.context_parallel.batch(whole))
        output.loss.backward()
        found[number] = output.logits.detach()

    assert run_ranks(4, rank, seconds=120) is None
    halves[False] = torch.cat([found[number] for number in range(4)], 1)
    assert error(halves[False].float(), exact) < 1.5 * error(halves[True].float(), exact)


# A batch ------------------------------------------------------------------------------------------


def parts(ranks, balance, **whole):
    ids = torch.arange(12).expand(2, -1)
    return [part_of_batch({"input_ids": ids, **whole}, r, ranks, balance) for r in range(ranks)]


def test_a_run_of_each_half():
    first, second, third = (p["input_ids"][0].tolist() for p in parts(3, "head_tail"))
    assert (first, second, third) == ([0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7])


def test_labels_are_those_of_the_next_tokens_of_the_whole():
    labels = torch.arange(100, 112).expand(2, -1)
    first, second = parts(2, "none", labels=labels)
    assert first["shift_labels"][0].tolist() == [*range(101, 107)]
    assert second["shift_labels"][1].tolist() == [*range(107, 112), -100]
    assert second["position_ids"][0].tolist() == [*range(6, 12)]


def test_each_document_is_balanced():
    positions = torch.cat([torch.arange(4), torch.arange(8)])[None]
    first, second = parts(2, "per_document", position_ids=positions)
    assert first["input_ids"][0].tolist() == [0, 3, 4, 5, 10, 11]
    assert second["input_ids"][0].tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("ranks", "balance", "more", "said"),
    [
        (5, "none", {}, "the length, 12, is not divisible by 5 ranks"),
        (4, "head_tail", {}, "the length, 12, is not divisible by 2 x 4 ranks"),
        (
            2,
            "per_document",
            {"position_ids": torch.cat([torch.arange(5), torch.arange(7)])[None]},
            "the length of a document, 5, is not divisible by 2 x 2 ranks",
        ),
        (
            2,
            "per_document",
            {"position_ids": torch.arange(1, 13)[None]},
            "the first position of a document is not 0",
        ),
        (2, "none", {"pixel_values": torch.zeros(2, 3)}, "no value for each token"),
        (2, "none", {"attention_mask": torch.ones(2, 1, 12, 12)}, "in a batch of 2 rows"),
        (2, "none", {"input_ids": None}, "the batch has no `input_ids`"),
    ],
)
def test_a_batch_that_cannot_be_split(ranks, balance, more, said):
    with pytest.raises(ContextError, match=said):
        parts(ranks, balance, **more)


# What refutes a plan ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("context") / "t.plan"
    path.write_text(PLAN)
    return path


def outcome(model, plan, *settings):
    case = simulated_case(model, plan, settings)
    return simulate(case.model.builder(), case.compiled.lowered)


def shifted_late(monkeypatch):
    def late(*args, **options):
        part = part_of_batch(*args, **options)
        part["shift_labels"] = pad(part["labels"], (0, 1), value=-100)[:, 1:]
        return part

    monkeypatch.setattr(parallel, "part_of_batch", late)


def from_zero(monkeypatch):
    def zero(*args, **options):
        part = part_of_batch(*args, **options)
        own = torch.arange(part["input_ids"].shape[1])
        return {**part, "position_ids": own.expand_as(part["input_ids"]).contiguous()}

    monkeypatch.setattr(parallel, "part_of_batch", zero)


def tokens_without(**values):
    def fault(monkeypatch):
        class Lacking(context_tokens.KeyTokens):
            def __init__(self, *args):
                super().__init__(*args)
                for name, value in values.items():
                    setattr(self, name, value)

        monkeypatch.setattr(parallel, "KeyTokens", Lacking)

    return fault


def counted_in_the_part(monkeypatch):
    monkeypatch.setattr(parallel, "counting_of", lambda _model: None)


def scaled_in_the_part(monkeypatch):
    monkeypatch.setattr(context_positions.PartCache, "get_seq_length", lambda *_: 0)


def chunks_of_the_part(monkeypatch):
    monkeypatch.setattr(context_tokens.KeyTokens, "left_padding", lambda _, padding: padding)


def keys_that_were_not_chosen(monkeypatch):
    monkeypatch.setattr(parallel, "of_chosen", lambda mask, _: mask)
    monkeypatch.setattr(parallel, "ChosenMask", lambda mask, _: mask)


def chosen_keys_of_the_first_rank(monkeypatch):
    """The numbers of keys count those of all ranks."""
    plain = context_ring.ChosenMask.among

    def among(self, queries, keys, _first):
        return plain(self, queries, keys, 0)

    monkeypatch.setattr(context_ring.ChosenMask, "among", among)


def chosen_among_repeated_keys(monkeypatch):
    def repeated(_cache, keys, *_):
        return torch.cat([keys, keys], 1)

    monkeypatch.setattr(context_positions.PartCache, "update_indexer", repeated)


def mean_of_means(monkeypatch):
    def leave(self, model, output):
        model.loss_function = self.function
        return output

    monkeypatch.setattr(parallel.PartLoss, "leave", leave)


def no_window(monkeypatch):
    mask = parallel.ContextParallel.mask

    def causal(self, q_length, kv_length, arguments):
        return mask(self, q_length, kv_length, {**arguments, "mask_function": causal_mask_function})

    monkeypatch.setattr(parallel.ContextParallel, "mask", causal)


def own_gradient(monkeypatch):
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), 2)[ctx.group.rank()].contiguous(), None

    monkeypatch.setattr(collectives.GatherSequence, "backward", staticmethod(backward))


def own_keys(monkeypatch):
    """Each rank sees its own keys in the place of all others."""

    class Repeated:
        @staticmethod
        def apply(part, group):
            return torch.cat([part] * group.size(), 2)

    monkeypatch.setattr(context_exchange, "GatherSequence", Repeated)


def whole_count(monkeypatch):
    monkeypatch.setattr(Lowered, "sequence_parts", 1)


FAULTS = {
    "labels are shifted after the split": shifted_late,
    "positions begin at zero on every rank": from_zero,
    "padding is forgotten": tokens_without(padding=None),
    "documents see each other": tokens_without(documents=None),
    "a window is ignored": no_window,
    "keys get the gradient of one rank's queries": own_gradient,
    "ranks see their own keys alone": own_keys,
    "the loss is divided by the labels of all ranks, and averaged": whole_count,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refuted(fault, plan, monkeypatch):
    FAULTS[fault](monkeypatch)
    assert outcome("gemma-3-1b", plan, "cp=2").verdict == "refuted"


def the_last_tile_alone(monkeypatch):
    """The softmax of each tile takes the place of what was before."""

    def replaced(scores, gives, top, total, output):
        top.copy_(scores.amax(-1, keepdim=True))
        weights = (scores - top).exp()
        total.copy_(weights.sum(-1, keepdim=True))
        output.copy_(gives(weights))

    monkeypatch.setattr(context_ring, "merge", replaced)


def tiles_that_count_alike(monkeypatch):
    merge = context_ring.merge

    def alike(scores, *rest):
        merge(scores - scores.amax(-1, keepdim=True), *rest)

    monkeypatch.setattr(context_ring, "merge", alike)


def the_wrong_way(monkeypatch):
    class Back(context_ring.PassedOn):
        def __init__(self, tensor, group):
            self.sent, self.received = tensor, torch.empty_like(tensor)
            self.works = distributed.batch_isend_irecv(
                [
                    distributed.P2POp(op, one, group=group, group_peer=peer % group.size())
                    for op, one, peer in (
                        (distributed.isend, self.sent, group.rank() - 1),
                        (distributed.irecv, self.received, group.rank() + 1),
                    )
                ]
            )

    monkeypatch.setattr(context_ring, "PassedOn", Back)


def gradients_that_do_not_return(monkeypatch):
    class Kept:
        def __init__(self, gradient):
            self.gradient = gradient

        def wait(self):
            return torch.zeros_like(self.gradient)

    monkeypatch.setattr(context_ring.Ring, "pass_on", lambda _, gradient: Kept(gradient))


def mask_of_the_own_block(monkeypatch):
    tile = context_ring.RingMask.tile
    own = lambda self, _, queries, keys: tile(self, self.ring.rank, queries, keys)  # noqa: E731
    monkeypatch.setattr(context_ring.RingMask, "tile", own)


def no_mask_of_others(monkeypatch):
    tile = context_ring.RingMask.tile

    def open_(self, owner, queries, keys):
        mask = tile(self, owner, queries, keys)
        return mask if owner == self.ring.rank else torch.ones_like(mask)

    monkeypatch.setattr(context_ring.RingMask, "tile", open_)


RING_FAULTS = {
    "what tiles find is not merged": the_last_tile_alone,
    "tiles count alike": tiles_that_count_alike,
    "blocks go the wrong way": the_wrong_way,
    "gradients do not come back to their owners": gradients_that_do_not_return,
    "each block has the mask of the rank's own": mask_of_the_own_block,
    "blocks of other ranks have no mask": no_mask_of_others,
    "documents see each other": tokens_without(documents=None),
    "padding is forgotten": tokens_without(padding=None),
    "a window is ignored": no_window,
}


@pytest.mark.parametrize("fault", RING_FAULTS)
def test_faults_of_a_ring_show(fault, monkeypatch):
    """Of four ranks: two cannot tell one way around from the other."""
    RING_FAULTS[fault](monkeypatch)
    kinds = ("padding", "packed")
    assert max(compared("gemma3_text", 4, "ring", "head_tail", kind) for kind in kinds) > 1e-2


@pytest.mark.parametrize("fault", [keys_that_were_not_chosen, chosen_keys_of_the_first_rank])
def test_faults_of_chosen_keys_in_a_ring_show(fault, monkeypatch):
    fault(monkeypatch)
    assert compared("deepseek_v32", 2, "ring", "head_tail", "plain") > 1e-2


OWN_FAULTS = [
    ("roberta", from_zero),
    ("roberta", counted_in_the_part),
    ("opt", counted_in_the_part),
    ("bart", from_zero),
    ("bart", mean_of_means),
    ("llama4_text", scaled_in_the_part),
    ("llama4_text", chunks_of_the_part),
    ("deepseek_v32", keys_that_were_not_chosen),
    ("deepseek_v32", chosen_among_repeated_keys),
]


def default_model(family, folder):
    """A folder with the family's default configuration."""
    AutoConfig.for_model(family).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("family", "fault"), OWN_FAULTS)
def test_faults_in_what_models_count_are_refuted(family, fault, plan, tmp_path, monkeypatch):
    model = default_model(family, tmp_path)
    fault(monkeypatch)
    assert outcome(model, plan, "cp=2").verdict == "refuted"


@pytest.mark.parametrize("family", OWN)
def test_what_models_count_is_right_beside_them(family, plan, tmp_path):
    found = outcome(default_model(family, tmp_path), plan, "cp=2")
    assert (found.verdict, found.passes[0]) == ("proved", "padding")


@pytest.mark.parametrize("way", ["cp=2", "cp=2 attention=ring"])
@pytest.mark.parametrize("balance", ["none", "head_tail", "per_document"])
def test_the_right_plan_beside_them(balance, way, plan):
    found = outcome("gemma-3-1b", plan, f"balance={balance}", *way.split())
    assert (found.verdict, found.passes) == ("proved", ("padding", "two packed documents"))
    assert found.worst < 1e-5


def test_positions_that_count_no_padding(plan):
    found = outcome("opt-1.3b", plan, "cp=2")
    assert (found.verdict, found.passes[0]) == ("proved", "padding")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("deepseek_v4", "has a recurrent state"),
        ("bloom", "does not call transformers' attention interface"),
        ("inkling_text", "InklingAttention has a bias for each pair of positions"),
    ],
)
def test_models_whose_tokens_see_each_other_otherwise(model, said, plan, tmp_path):
    named = tmp_path / "t.plan"
    named.write_text(PLAN.replace("for llama", f"for {model}, llama"))
    folder = default_model(model, tmp_path)
    verdict, findings = simulated(folder, named, ("cp=2",), world=2)
    assert verdict.verdict == "refuted"
    (found,) = [d for d in findings if d.code == "PL541"]
    assert any(said in fact for fact in found.facts)
    assert found.labels[0].span.text == "attention = attention"


def test_help_for_an_auxiliary_loss(plan, tmp_path):
    """An auxiliary loss is not a sum over tokens: the help is not about attention."""
    named = tmp_path / "t.plan"
    named.write_text(PLAN.replace("for llama", "for mixtral, llama"))
    folder = default_model("mixtral", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    verdicts = []
    for asked in (True, False):
        asks = {"output_router_logits": asked, "router_aux_loss_coef": 0.5}
        file.write_text(json.dumps({**config, **asks}))
        verdict, findings = simulated(folder, named, ("cp=2",), world=2)
        verdicts.append(verdict.verdict)
        if asked:
            (found,) = [d for d in findings if d.code == "PL541"]
            assert "`output_router_logits = false`" in found.help, found.facts
            assert any(fact.startswith("the loss differs, and") for fact in found.facts)
    assert verdicts == ["refuted", "proved"]


def not_gathered(monkeypatch):
    monkeypatch.setattr(context_blocks.ContextInBlocks, "gather_tokens", lambda self, part: part)


def without_gradients(monkeypatch):
    plain = context_rows.GatherSequence
    detached = SimpleNamespace(apply=lambda part, group: plain.apply(part.detach(), group))
    monkeypatch.setattr(context_rows, "GatherSequence", detached)


def not_in_order(monkeypatch):
    plain = context_rows.ContextOfRows.local_tokens
    monkeypatch.setattr(
        context_rows.ContextOfRows, "local_tokens", lambda self, every: plain(self, every.flip(1))
    )


def of_the_first_rank(monkeypatch):
    def leave_out(self, _module, _args, output):
        return tuple(v[:, : v.shape[1] // 2] if v.dim() == 3 else v for v in output)

    monkeypatch.setattr(context_blocks.ContextInBlocks, "_leave_out", leave_out)


FAULTS_OF_GATHERING = (not_gathered, without_gradients, not_in_order, of_the_first_rank)


@pytest.mark.parametrize("fault", [None, *FAULTS_OF_GATHERING])
def test_attention_of_a_models_own(fault, monkeypatch):
    case = simulated_case("bloom-7b1", "bloom", ("cp=2",))
    if fault is not None:
        fault(monkeypatch)
    found = simulate(case.model.builder(), case.compiled.lowered)
    assert found.verdict == ("proved" if fault is None else "refuted")


@pytest.mark.parametrize("model", ["qwen3-8b", "gemma-2-9b", "gpt-oss-20b", "deepseek-v3"])
def test_a_ring_is_proved(model, plan):
    found = outcome(model, plan, "cp=2", "attention=ring")
    assert (found.verdict, found.passes) == ("proved", ("padding", "two packed documents"))
    assert found.worst < 1e-5


@pytest.mark.parametrize("attention", ["all_gather", "ring"])
def test_in_a_pipeline_and_with_divided_experts(attention, tmp_path):
    pipeline = "pipeline on pp {\n schedule = 1f1b\n microbatches = 2\n"
    pipeline += " stages = even(model.layers.*)\n}\n"
    experts = "expert on ep {\n model.layers.*.mlp.experts : dispatch(all_to_all)\n}\n"
    unit = "    model.layers.*.mlp.experts : unit(on = ep_shard)\n    root"
    for model, axis, more, root in (
        ("llama-3.1-8b", "pp = 2\n    dp_shard", pipeline, "    root"),
        ("mixtral-8x7b", "ep = 2\n    dp_shard", experts, unit),
    ):
        path = tmp_path / f"{model}.plan"
        text = PLAN.replace("for llama", "for mixtral, llama").replace("dp_shard", axis, 1)
        path.write_text(text.replace("    root", root) + more)
        settings = "cp=2", f"attention={attention}"
        verdict, findings = simulated(model, path, settings, world=8)
        assert (verdict.verdict, findings) == ("proved", []), model


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
def test_a_pipeline_of_a_model_that_takes_no_positions(schedule, tmp_path):
    """Its loss is a mean over the labels of each microbatch, unlike in parts of the sequence."""
    pipeline = f"pipeline on pp {{\n schedule = {schedule}\n microbatches = 2\n"
    pipeline += " stages = even(model.decoder.layers.*)\n}\n"
    path = tmp_path / "t.plan"
    path.write_text(PLAN.replace("dp_shard = auto", "pp = 2\n    dp_shard = auto") + pipeline)
    verdict, findings = simulated(default_model("bart", tmp_path), path, ("cp=2",), world=4)
    assert (verdict.verdict, {d.code for d in findings} - {"PL517"}) == ("proved", set())


# On the ranks of a run ----------------------------------------------------------------------------


def on_ranks(plan, program, *settings):
    """Runs `program(run, model, number)` on the ranks of a small llama's plan."""
    case = simulated_case("llama-3.1-8b", plan, settings, world=2)
    lowered, builder = case.compiled.lowered, case.model.builder()
    models = [builder.build(0) for _ in range(lowered.world_size)]

    def rank(number):
        run = apply_lowered(
            models[number],
            lowered,
            digest=digest(lowered),
            device_type="cpu",
            compare=2,
        )
        program(run, models[number], number)

    return run_ranks(len(models), rank, seconds=120)


def test_a_length_that_does_not_divide_stops_every_rank(plan):
    said = []

    def program(run, _model, _number):
        with pytest.raises(PlanError) as caught:
            run.batch({"input_ids": torch.zeros(2, 6).long()})
        said.append([(d.code, d.labels[0].span.text) for d in caught.value.diagnostics])

    assert on_ranks(plan, program, "cp=2") is None
    line = 'run.batch({"input_ids": torch.zeros(2, 6).long()})'
    assert said == [[("PL544", line)]] * 2


def test_help_for_starts_of_documents_in_a_flattened_batch(plan):
    starts = torch.tensor([0, 4, 8], dtype=torch.int32)
    ids, places = torch.zeros(1, 8).long(), torch.arange(8)[None] % 4
    said, parts = [], []

    def program(run, _model, _number):
        batch = {"input_ids": ids, "position_ids": places}
        kernel = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 4}
        with pytest.raises(PlanError) as caught:
            run.batch({**batch, **kernel})
        said.extend(d.help for d in caught.value.diagnostics)
        parts.append(run.batch(batch)["input_ids"].shape)

    assert on_ranks(plan, program, "cp=2") is None
    advice = "leave out `cu_seq_lens_q`, `cu_seq_lens_k` and `max_length_q`"
    assert len(said) == 2 and all(advice in help for help in said)
    assert parts == [(1, 4)] * 2, "the advice can be followed"


def test_batches_that_differ_stop_every_rank(plan):
    said = []

    def program(run, _model, number):
        with pytest.raises(PlanError) as caught:
            run.batch({"input_ids": torch.full((2, 8), number)})
        said.append(caught.value.diagnostics[0].message)

    assert on_ranks(plan, program, "cp=2") is None
    assert len(said) == 2 and "read different inputs in batch 1: `input_ids`" in said[0]


@pytest.mark.parametrize(
    ("without", "wanted"),
    [("position_ids", "pass it `run.batch"), ("shift_labels", "labels without")],
)
def test_a_pass_without_what_a_part_needs(without, wanted, plan):
    def program(run, model, _number):
        ids = torch.ones(2, 8).long()
        part = run.batch({"input_ids": ids, "labels": ids})
        part.pop(without)
        with pytest.raises(ContextError, match=wanted):
            model(**part)

    assert on_ranks(plan, program, "cp=2") is None


def test_the_number_of_labels_is_that_of_all_ranks(plan):
    def program(run, _model, _number):
        labels = torch.ones(3, 8).long()
        labels[0] = -100
        assert run.num_items_in_batch(labels) == 14 / 2

    assert on_ranks(plan, program, "cp=2") is None


def test_one_rank_has_whole_sequences(plan):
    def program(run, _model, _number):
        ids = torch.ones(2, 7).long()
        assert list(run.batch({"input_ids": ids})) == ["input_ids"]

    assert on_ranks(plan, program, "cp=1") is None


@pytest.mark.usefixtures("script_alone")
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "all_gather"),
        ("llama", "ulysses"),
        ("llama", "ring"),
        *((name, "all_gather") for name in OWN),
    ],
)
def test_the_script_computes_the_same_bits(family, attention, plan, tmp_path):
    model = default_model(family, tmp_path)
    case = simulated_case(model, plan, ("cp=2", f"attention={attention}"), world=2)
    lowered, builder = case.compiled.lowered, case.model.builder()
    source = compile(render(lowered, digest=digest(lowered)), "script", "exec")
    names = {"__name__": "script"}
    exec(source, names)  # once: it registers its attention with transformers, as a process does
    ids = torch.randint(1, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    whole = {"input_ids": ids, "labels": ids}

    def trained(script):
        models, found = [builder.build(0) for _ in range(2)], {}

        def rank(number):
            model = models[number]
            if script:
                names["parallelize"](model, names["build_mesh"]("cpu"))
                part = model.context_parallel.batch(whole)
            else:
                run = apply_lowered(model, lowered, digest=digest(lowered), device_type="cpu")
                part = run.batch(whole)
            output = model(**part, **({"num_items_in_batch": 15} if family == "llama" else {}))
            output.loss.backward()
            grads = (p.grad for p in model.parameters() if p.grad is not None)
            gradients = [grad.to_local().clone() for grad in grads]
            found[number] = [output.logits.detach(), output.loss.detach(), *gradients]

        assert run_ranks(2, rank, seconds=120) is None
        return found

    mine, theirs = trained(False), trained(True)
    for number in (0, 1):
        for one, two in zip(mine[number], theirs[number], strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("ratios", [[0, 4, 128, 4], [0, 0, 4, 128, 4]])
def test_the_last_block_is_the_last_by_number(ratios, tmp_path):
    """Blocks of one kind are one entry: the last entry, of a kind that began later, is not last."""
    values = json.loads((PLANS / "models" / "deepseek-v4-flash.json").read_text())
    values |= {"num_hidden_layers": len(ratios), "compress_ratios": ratios, "num_hash_layers": 0}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values))
    compiled = compiled_of(str(path), "deepseek_v4", ["cp=2"], world=2)
    [op] = compiled.lowered.find_ops(ContextParallel)
    assert op.blocks == ("model.layers.0", f"model.layers.{len(ratios) - 1}")
    verdict = flow(compiled, Sink())
    assert verdict.verdict == "proved", verdict.reason
