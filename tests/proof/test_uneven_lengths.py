"""Lengths that the tensor axis does not divide: right numbers, or refused when the batch comes."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from helpers import sampled, simulated
from test_own_module import Net
from transformers import BigBirdConfig, Wav2Vec2Config, Wav2Vec2ForCTC

sys.path.append(str(Path(__file__).parent / "processes"))
import numerics

import planc
from planc.emit.python.script import render
from planc.runtime.executor import apply_lowered
from planc.runtime.known_verdict import KnownVerdict
from planc.runtime.safeguards.padded_lengths import padding_dependence
from planc.simulate import batches
from planc.simulate.thread_ranks import run_ranks

CASES = [
    ("llama-3.1-8b", "llama", 2, ("tp=2",)),
    ("phi-4", "phi3", 2, ("tp=2",)),
    ("llama-3.1-8b", "llama", 4, ("tp=2", "pp=2")),
    ("llama-3.1-8b", "adapted", 2, ("tp=2",)),
    ("mixtral-8x7b", "mixtral", 4, ("tp=4",)),
    ("gpt2", "gpt2", 4, ("tp=4",)),
]
ADAPTED = """plan adapted for llama

extend "llama"

adapters {
    model.layers.*.self_attn.{q,o}_proj : lora(rank = 4)
    model.layers.*.mlp.{gate,down}_proj : lora(rank = 4)
}
"""


@pytest.mark.parametrize(("model", "plan", "world", "settings"), sampled(CASES, 4))
def test_the_last_ranks_have_fewer_tokens(model, plan, world, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    (tmp_path / "adapted.plan").write_text(ADAPTED)
    plan = str(tmp_path / "adapted.plan") if plan == "adapted" else plan
    lengths = []
    real = batches._uneven_length
    seen = lambda *given: lengths.append(real(*given)) or lengths[-1]  # noqa: E731
    monkeypatch.setattr(batches, "_uneven_length", seen)
    verdict, found = simulated(model, plan, settings, world=world)
    assert verdict.verdict == "proved", [d.message for d in found]
    assert lengths and lengths[0] % int(settings[0].removeprefix("tp="))
    kinds = {d.kind for d in verdict.outcome.discrepancies}
    assert "lengths" not in kinds and "PL516" not in [d.code for d in found]


LOCAL = """plan own for Net

mesh {
    tp = 2
}

tensor on tp {
    table : rowwise(-> shard(1))
    blocks.* {
        norm : sequence(local = true)
        up   : colwise(shard(1) -> shard(-1))
        down : rowwise(-> shard(1))
    }
    head : colwise(shard(1) -> replicate)
}
"""


def test_local_shards_are_right_for_lengths_that_divide(tmp_path):
    """The shards of 15 tokens do not say that they are of 15."""
    (tmp_path / "own.plan").write_text(LOCAL)
    found = planc.check(Net(), str(tmp_path / "own.plan"), world_size=2)
    [one] = [d for d in found if d.severity != "info" and d.code != "PL414"]
    assert (one.code, one.severity) == ("PL516", "warning")
    assert "tp is 2" in one.labels[0].text


@pytest.mark.parametrize(("length", "even"), [(16, True), (15, True), (15, False)])
def test_a_batch_of_another_length_is_refused_where_the_proof_says_so(length, even, tmp_path):
    text = LOCAL.replace("-> shard(1))", "-> shard(1), local = false)")
    (tmp_path / "own.plan").write_text(text.replace("sequence(local = true)", "sequence"))
    torch.manual_seed(0)
    models, raised = [copy.deepcopy(Net()) for _ in range(2)], []
    lowered = planc.lower(models[0], str(tmp_path / "own.plan"), world_size=2)
    known = KnownVerdict(level="proved", text="proved", even=even)

    def rank(number):
        apply_lowered(models[number], lowered, digest="", device_type="cpu", known=known)
        try:
            models[number](torch.ones(2, length, dtype=torch.int64))
        except planc.PlanError as error:
            raised.extend(d.code for d in error.diagnostics)

    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure.message
    assert raised == (["PL516"] * 2 if even and length == 15 else [])


ORIGINAL = 8  # positions, beyond which frequencies change
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + n for n in range(8)]}
ROTARY = {
    "dynamic": {"factor": 2.0},
    "longrope": {**FACTORS, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}
LENGTHS = [(16, 6), (6, 5), (12, 16)]
"""The tokens of a row of each data rank, in the passes of a run."""


def rotary_model(kind):
    rotary = {"rope_type": kind, "rope_theta": 10000.0, **ROTARY[kind]}
    positions = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    return numerics.build("llama", rope_parameters=rotary, max_position_embeddings=positions)


def rows_of(step, data_rank, length):
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    tokens = torch.randint(0, 128, (2, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded_rows(step, lengths):
    """The rows of all data ranks in one batch."""
    every = [rows_of(step, rank, length) for rank, length in enumerate(lengths)]
    pad = torch.nn.functional.pad
    missing = [(0, max(lengths) - length) for length in lengths]
    pairs = [*zip(every, missing, strict=True)]
    return {
        "input_ids": torch.cat([pad(b["input_ids"], m) for b, m in pairs]),
        "labels": torch.cat([pad(b["labels"], m, value=-100) for b, m in pairs]),
        "attention_mask": torch.cat([pad(torch.ones_like(b["labels"]), m) for b, m in pairs]),
    }


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize(
    "settings", [[], ["tp=2"], ["pp=2", "microbatches=2"], ["dp_replicate=2"]], ids=str
)
def test_rotary_frequencies_depend_on_the_rows_of_all_data_ranks(kind, settings):
    """As those of one process with these rows in one pass; `dynamic` also has a state."""
    single, right = rotary_model(kind), []
    for step, lengths in enumerate(LENGTHS):
        single.zero_grad()
        loss = single(**padded_rows(step, lengths)).loss
        loss.backward()
        right.append((loss.detach(), {n: p.grad for n, p in single.named_parameters()}))
    ranks = 4 if {"tp=2", "pp=2"} & {*settings} else 2
    models, found = [rotary_model(kind) for _ in range(ranks)], {}

    def rank(number):
        overrides = ["param_dtype=fp32", "reduce_dtype=fp32", *settings]
        options = {"device_type": "cpu", "require": "nothing", "compare": 0}
        run = planc.apply(models[number], "llama", overrides=overrides, **options)
        for step, lengths in enumerate(LENGTHS):
            run.model.zero_grad()
            batches = [rows_of(step, run.data_rank, lengths[run.data_rank])]
            seen = run.evaluate(batches), run.forward_backward(batches)
            named = [(numerics.plain(n), p.grad) for n, p in run.model.named_parameters()]
            grads = {n: numerics.whole(g) for n, g in named if g is not None}
            errors = [numerics.error(grad, right[step][1][n]) for n, grad in grads.items()]
            found[number, step] = *seen, max(errors)

    failure = run_ranks(ranks, rank, seconds=90)
    assert failure is None, failure and (failure.error or failure.message)
    for (_, step), (evaluated, loss, error) in found.items():
        torch.testing.assert_close(evaluated, right[step][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss, right[step][0], rtol=1e-5, atol=1e-6)
        assert error < 1e-4


def packed_rows(step):
    """A row of one document, and one of several: their longest positions differ."""
    batch = rows_of(step, 0, 16)
    several = torch.arange(4).repeat(4)
    return {**batch, "position_ids": torch.stack([torch.arange(16), several])}


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        (["cp=2"], [rows_of(0, 0, 16), rows_of(1, 0, 8), rows_of(2, 0, 12)]),
        (["pp=2", "microbatches=2"], [packed_rows(0), rows_of(1, 0, 6), packed_rows(2)]),
    ],
    ids=["parts", "microbatches"],
)
def test_rotary_frequencies_depend_on_whole_rows_and_batches(kind, settings, batches):
    """Ranks with parts of a sequence and microbatches have other longest positions."""
    single, right = rotary_model(kind), []
    for batch in batches:
        single.zero_grad()
        loss = single(**batch, use_cache=False).loss  # else documents see each other
        loss.backward()
        right.append((loss.detach(), {n: p.grad for n, p in single.named_parameters()}))
    models, found = [rotary_model(kind) for _ in range(2)], {}

    def rank(number):
        overrides = ["param_dtype=fp32", "reduce_dtype=fp32", *settings]
        options = {"device_type": "cpu", "require": "nothing", "compare": 0}
        run = planc.apply(models[number], "llama", overrides=overrides, **options)
        for step, batch in enumerate(batches):
            run.model.zero_grad()
            if "cp=2" in settings:  # a pass without gradients, in a loop of the script
                with torch.no_grad():
                    run.model(**run.batch(batch))
            seen = run.evaluate([batch]), run.forward_backward([batch])
            named = [(numerics.plain(n), p.grad) for n, p in run.model.named_parameters()]
            grads = {n: numerics.whole(g) for n, g in named if g is not None}
            errors = [numerics.error(grad, right[step][1][n]) for n, grad in grads.items()]
            found[number, step] = *seen, max(errors)

    failure = run_ranks(2, rank, seconds=90)
    assert failure is None, failure and (failure.error or failure.message)
    for (_, step), (evaluated, loss, error) in found.items():
        torch.testing.assert_close(evaluated, right[step][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss, right[step][0], rtol=1e-5, atol=1e-6)
        assert error < 1e-4


def test_a_pass_of_one_rank_alone_sees_its_own_rows():
    """A pass without gradients outside of `run.evaluate` sends nothing, and is that of one
    process with these rows.
    """
    batch = {"input_ids": rows_of(0, 0, 16)["input_ids"]}
    with torch.no_grad():
        right = rotary_model("longrope")(**batch).logits
    models, found = [rotary_model("longrope") for _ in range(2)], {}

    def rank(number):
        options = {"device_type": "cpu", "require": "nothing", "compare": 0}
        overrides = ["param_dtype=fp32", "dp_replicate=2"]
        run = planc.apply(models[number], "llama", overrides=overrides, **options)
        with run.unshard(), torch.no_grad():
            found[number] = run.model(**batch).logits if number else None

    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure and (failure.error or failure.message)
    torch.testing.assert_close(found[1], right, rtol=1e-5, atol=1e-5)


def test_an_emitted_script_sees_the_rows_of_all_data_ranks():
    lengths = LENGTHS[0]
    single = rotary_model("longrope")
    single(**padded_rows(0, lengths)).loss.backward()
    right = {name: p.grad for name, p in single.named_parameters()}
    overrides = ["param_dtype=fp32", "reduce_dtype=fp32"]
    lowered = planc.lower(rotary_model("longrope"), "llama", world_size=2, overrides=overrides)
    space = {}
    exec(render(lowered, digest="0" * 64), space)
    models, found = [rotary_model("longrope") for _ in range(2)], {}
    labels = sum(2 * (length - 1) for length in lengths)

    def rank(number):
        model = space["parallelize"](models[number], space["build_mesh"]("cpu"))
        batch = rows_of(0, number, lengths[number])
        model(**batch, num_items_in_batch=labels / 2).loss.backward()
        named = [(numerics.plain(n), numerics.whole(p.grad)) for n, p in model.named_parameters()]
        found[number] = max(numerics.error(grad, right[name]) for name, grad in named)

    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure and (failure.error or failure.message)
    assert max(found.values()) < 1e-4


# Models whose outputs depend on the padded length -------------------------------------------------

SOUND = """plan own for wav2vec2

mesh {
    dp_shard = 2
}

fsdp on dp_shard {
    precision(param = fp32, reduce = fp32)
    root : unit
}
"""


def sound_model(norm="group"):
    layers = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    others = {"intermediate_size": 16, "num_conv_pos_embeddings": 4, "vocab_size": 20}
    rates = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout")
    nothing = dict.fromkeys((*rates, "final_dropout", "layerdrop"), 0.0)
    groups = {"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
    names = {"num_feat_extract_layers": 2, "feat_extract_norm": norm}
    torch.manual_seed(0)
    config = Wav2Vec2Config(**layers, **sizes, **others, **nothing, **groups, **names)
    return Wav2Vec2ForCTC(config)


def sounds(rank, samples):
    """A row of 400 samples, padded with zeros."""
    generator = torch.Generator().manual_seed(rank)
    row = torch.randn(1, 400, generator=generator)
    return torch.nn.functional.pad(row, (0, samples - 400))


def of_frames(model, rows):
    """The mean square of the first 10 frames, which padding does not reach."""
    mask = torch.arange(rows.shape[1]).lt(400).long().expand_as(rows)
    logits = model(input_values=rows, attention_mask=mask).logits
    return logits[:, :10].square().mean()


@pytest.mark.parametrize(
    ("norm", "samples", "raises"),
    [("group", (400, 800), True), ("group", (800, 800), False), ("layer", (400, 800), False)],
)
def test_rows_of_one_padded_length(norm, samples, raises, tmp_path):
    (tmp_path / "own.plan").write_text(SOUND)
    single = sound_model(norm)
    of_frames(single, torch.cat([sounds(rank, 800) for rank in range(2)])).backward()
    right = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
    models, found = [sound_model(norm) for _ in range(2)], {}

    def rank(number):
        plan, options = tmp_path / "own.plan", {"device_type": "cpu", "require": "nothing"}
        run = planc.apply(models[number], plan, compare=2, **options)
        of_frames(run.model, sounds(number, samples[number])).backward()
        named = ((numerics.plain(n), p.grad) for n, p in run.model.named_parameters())
        own = {n: numerics.whole(g) for n, g in named if g is not None}
        found[number] = max(numerics.error(own[n], right[n], 1e-6) for n in right)

    failure = run_ranks(2, rank, seconds=60)
    if raises:
        assert failure is not None and "PL424" in str(failure.error)
        assert "400 to 800" in str(failure.error)
        assert "test_uneven_lengths.py" in str(failure.error)
        return
    assert failure is None, failure and (failure.error or failure.message)
    assert max(found.values()) < 1e-4


def test_models_that_depend_on_the_padded_length():
    assert "group norm" in padding_dependence(sound_model().config)
    assert "attention" in padding_dependence(BigBirdConfig())
    assert padding_dependence(numerics.build("llama").config) == ""
    assert padding_dependence(BigBirdConfig(attention_type="original_full")) == ""
    assert padding_dependence(None) == ""
