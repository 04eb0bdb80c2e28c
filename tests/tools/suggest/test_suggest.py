"""What `planc suggest` names is what the compiler and the estimate say of its plan."""

import re
from dataclasses import replace
from functools import cache
from math import inf
from types import SimpleNamespace

import pytest
from helpers import slow

from planc import compiler
from planc.checks.queries import divisors
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.model.load import load
from planc.syntax.formatter.files import formatted_files
from planc.syntax.parse import parse
from planc.tools.estimate.answer import Request, answer
from planc.tools.estimate.from_plan import Batch
from planc.tools.suggest import search as searching
from planc.tools.suggest import suggest as suggesting
from planc.tools.suggest.candidates import UNSPLIT, Candidates
from planc.tools.suggest.choice import FASTEST, LEANEST
from planc.tools.suggest.suggest import Asked, suggest
from planc.tools.suggest.suggestion_text import text as report

GIB = 2**30


@cache
def suggested(model, world_size, rows, tokens, **more):
    sink = Sink()
    facts = load(model, sink)
    batch = Batch(global_batch=rows, sequence=tokens)
    memory = more.pop("memory", None)
    asked = Asked(
        plan=None,
        world_size=world_size,
        request=Request(batch=batch, device_memory=memory),
        **more,
    )
    steps = []
    made = suggest(facts, asked, sink, lambda done, total: steps.append((done, total)))
    assert made, sink.diagnostics
    return facts, made, steps


def lines(made):
    """The report of a suggestion."""
    return [*report(made)]


def fastest(made):
    """Seconds of the fastest plan, which slack can put second among those within 1 %."""
    return min(c.seconds for c in made.found.best)


@pytest.mark.parametrize(
    ("model", "world_size", "rows", "tokens"),
    [
        ("llama-3.1-8b", 16, 32, 8192),
        slow("deepseek-v3", 512, 512, 4096),
        ("gpt2", 4, 32, 1024),
        slow("qwen3-30b-a3b", 24, 48, 4096),
    ],
)
def test_each_plan_compiles_and_is_what_the_table_says(model, world_size, rows, tokens, tmp_path):
    facts, made, _ = suggested(model, world_size, rows, tokens)
    assert len(made.found.best) == 10
    for i, candidate in enumerate(made.found.best):
        faster = [c for c in made.found.best[i:] if c.seconds < candidate.seconds]
        assert all(candidate.seconds <= 1.01 * c.seconds for c in faster)
        assert all(candidate.peak < c.peak for c in faster)  # slack, for what is not told apart
    for candidate in made.found.best[:4]:
        path = tmp_path / "suggested.plan"
        path.write_text(candidate.text)
        sink = Sink()
        compiled = compiler.compile_plan(facts, str(path), sink, world_size=world_size)
        assert compiled.lowered, sink.diagnostics
        assert {a.name: a.size for a in compiled.plan.mesh.axes} == dict(candidate.mesh)
        batch = replace(made.asked.request.batch, micro_batches=candidate.micro_batches)
        found = answer(*compiled.applied, Request(batch=batch), sink)
        assert found.estimate.fits
        assert found.estimate.time.seconds == candidate.seconds
        assert found.estimate.fullest.peak / GIB == candidate.peak
        [layout] = formatted_files([str(path)], sink)
        assert not layout.changes


@pytest.mark.slow
def test_the_best_of_every_choice_is_found():
    """Beside a search of all meshes, all ways and all variations, without a shortcut."""
    _, made, _ = suggested("llama-3.1-8b", 8, 16, 8192)
    space, candidates = everything("llama-3.1-8b", 8, 16, 8192)
    found = []
    for sizes in space.meshes():
        for choice in space.choices(sizes):
            for other in (choice, *space.variations(choice)):
                compiled = candidates.compile(other, Sink())
                if compiled.lowered and (one := candidates.candidate(other)):
                    found.append(one)
    best = min(found, key=lambda c: c.seconds)
    assert fastest(made) == pytest.approx(best.seconds, rel=1e-12)
    assert made.found.best[0].seconds <= 1.01 * fastest(made)


def everything(model, world_size, rows, tokens):
    """The space and the candidates of a search that was stopped before it began."""
    kept = []

    class Stop(Exception):
        pass

    def stop(candidates, _progress, budgets):
        kept.append(candidates)
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suggesting, "search", stop)
        with pytest.raises(Stop):
            batch = Batch(global_batch=rows, sequence=tokens)
            asked = Asked(plan=None, world_size=world_size, request=Request(batch=batch))
            suggest(load(model, Sink()), asked, Sink())
    [candidates] = kept
    assert isinstance(candidates, Candidates)
    return candidates.space, candidates


def test_what_is_computed_without_replicas_is_what_the_plan_says():
    """A search reuses one structure for all numbers of replicas; the end result is compiled."""
    space, candidates = everything("llama-3.1-8b", 16, 32, 8192)
    checked = 0
    for sizes in space.meshes():
        if dict(sizes)["tp"] > 8:
            continue
        for choice in space.choices(sizes):
            quick = candidates.candidate(choice)
            exact = quick and candidates.verify(quick)
            if exact:
                assert (exact.seconds, exact.peak) == (quick.seconds, quick.peak), quick.label
                checked += 1
    assert checked > 40


def test_more_micro_batches_only_where_fewer_do_not_fit():
    _, candidates = everything("llama-3.2-1b", 8, 64, 8192)
    space = candidates.space
    choice = space.probe((("dp_replicate", 1), ("tp", 1)), {"recompute": False})
    found = candidates.candidate(choice)
    assert found.micro_batches > 1
    candidates.micro_batches = found.micro_batches // 2
    assert candidates.candidate(choice) is None
    assert "needs more than" in next(iter(candidates.tally.excluded))


def test_requirements_and_settings():
    _, free, _ = suggested("llama-3.1-8b", 16, 32, 8192)
    _, made, _ = suggested(
        "llama-3.1-8b", 16, 32, 8192, requires=("tp == 2",), settings=("loss_chunks=8",)
    )
    assert {dict(c.mesh)["tp"] for c in made.found.best} == {2}
    texts = [" ".join(c.text.split()) for c in made.found.best]
    assert all("override option loss_chunks = 8" in t for t in texts)
    assert all('require tp == 2 "asked for: tp == 2"' in t for t in texts)
    cost = made.found.costs["tp == 2"]
    assert fastest(free) <= cost.seconds < fastest(made)


def test_a_recipe_is_compared_with_the_fastest_plan():
    """It is searched as if the user had set its axes, the others having one rank."""
    recipes = "tp=4, pp=2", "tp=1 recompute=false loss_chunks=0"
    facts, made, _ = suggested("llama-3.1-8b", 16, 32, 8192, compare=recipes, memory=30 * GIB)
    slower, large = made.compared
    best = slower.best
    assert dict(best.mesh) == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 4}
    assert best.seconds > fastest(made)
    [text] = [line for line in lines(made) if line.startswith("--compare 'tp=4, pp=2' takes")]
    assert re.search(r"% longer than 1: .*ms tensor collectives", text)
    compiled = compiler.compile(
        (*made.candidates.files, parse(Source("a.plan", best.text), Sink())),
        facts,
        Sink(),
        world_size=16,
    )
    batch = Batch(global_batch=32, sequence=8192, micro_batches=best.micro_batches)
    exact = answer(*compiled.applied, Request(batch=batch, device_memory=30 * GIB), Sink())
    assert exact.estimate.time.seconds == pytest.approx(best.seconds)
    assert large.best is None and large.nearest.peak > 28
    [text] = [line for line in lines(made) if line.startswith("--compare 'tp=1 ")]
    assert "does not fit: the leanest needs " in text and " GiB of the usable 26.4" in text


def test_a_recipe_that_is_among_the_first_plans():
    mesh = "dp_replicate=1 tp=1"
    _, made, _ = suggested("gpt2", 4, 32, 1024, compare=(mesh,))
    assert f"--compare '{mesh}' is 1" in lines(made)
    _, made, _ = suggested("gpt2", 4, 2, 1024, compare=(mesh,))
    [text] = [line for line in lines(made) if line.startswith("--compare ")]
    assert text == f"--compare '{mesh}' has no plan: {UNSPLIT}: 2 rows among 4 ranks"


def test_a_recipe_with_an_unknown_name():
    sink, facts = Sink(), load("gpt2", Sink())
    asked = Asked(
        plan=None,
        world_size=4,
        request=Request(batch=Batch(global_batch=32, sequence=1024)),
        compare=("tpp=2",),
    )
    assert suggest(facts, asked, sink) is None
    assert "tpp" in next(iter(sink)).message


@pytest.mark.slow
def test_less_memory_never_makes_it_faster():
    times = [
        fastest(suggested("llama-3.1-8b", 8, 16, 8192, memory=gib * GIB)[1]) for gib in (24, 40, 80)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[2]


def test_progress_grows_to_the_end():
    _, _, steps = suggested("llama-3.1-8b", 16, 32, 8192)
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    assert {total for _, total in steps} == {steps[-1][1]}


def test_a_model_whose_layers_cannot_be_counted():
    sink, batch = Sink(), Batch(global_batch=8, sequence=1024)
    facts = replace(load("llama-3.2-1b", sink), code="mylib.models:build")
    asked = Asked(plan=None, world_size=8, request=Request(batch=batch))
    assert suggest(facts, asked, sink) is None
    unknown = {d.code: d for d in sink.diagnostics}
    assert unknown["PL712"].severity == "error"
    assert "No module named 'mylib'" in unknown["PL712"].facts[0]


def test_divisors():
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1024, 8) == (1, 2, 4, 8)
    assert divisors(7) == (1, 7)


def test_a_plan_with_fixed_sizes_and_its_own_units(tmp_path):
    """No axis is `auto`, checkpointing has no option, and a unit has a precision of its own."""
    (tmp_path / "own.plan").write_text(OWN)
    sink, batch = Sink(), Batch(global_batch=16, sequence=4096)
    asked = Asked(
        plan=str(tmp_path / "own.plan"),
        world_size=16,
        request=Request(batch=batch),
        folder=str(tmp_path),
    )
    made = suggest(load("llama-3.1-8b", sink), asked, sink)
    assert made, sink.diagnostics
    texts = [c.text for c in made.found.best]
    assert all(parse(Source("x", t), sink).statements for t in texts)
    assert any("override dp = 8" in t or "override dp         = 8" in t for t in texts)
    resident = [c for c in made.found.best if c.choice.resident]
    for candidate in resident:
        assert "unit(precision(param = bf16), reshard = never)" in candidate.text


OWN = """plan own for llama

mesh {
    dp = 16
    tp = 1
}

tensor on tp {
    lm_head : colwise(-> replicate)
}

checkpoint {
    model.layers.* : full
}

fsdp on dp {
    precision(param = bf16, reduce = fp32)
    model.layers.* : unit(precision(param = bf16))
    root           : unit
}
"""


@pytest.mark.slow
def test_experts_are_divided_where_that_is_faster():
    """Deepseek-v3 on 512 ranks: all-gathering its experts takes longer than sending tokens."""
    _, made, _ = suggested("deepseek-v3", 512, 512, 4096)
    best = made.found.best[0]
    assert dict(best.choice.sizes)["ep"] > 1
    _, alone, _ = suggested("deepseek-v3", 512, 512, 4096, settings=("ep=1",))
    assert {dict(c.choice.sizes)["ep"] for c in alone.found.best} == {1}
    assert best.seconds < alone.found.best[0].seconds


@pytest.mark.slow
def test_no_number_of_ranks_for_experts_is_better_than_the_best():
    """No rank holds all experts of deepseek-v3: divided by 4 it takes 29 s, and by 256 16 s."""
    _, made, _ = suggested("deepseek-v3", 1024, 1024, 4096)
    space, candidates = everything("deepseek-v3", 1024, 1024, 4096)
    found = []
    for replicas, tensor in ((1, 1), (4, 1), (2, 2), (1, 8), (1, 16)):
        for ranks in (4, 16, 32, 64, 256):
            given = dict(pp=1, dp_replicate=replicas, cp=1, tp=tensor, ep=ranks)
            if one := candidates.candidate(space.probe(tuple(given.items()), {})):
                found.append(one.seconds)
    assert len(found) > 15
    assert fastest(made) <= min(found) * (1 + 1e-12)


@pytest.mark.slow
def test_a_pipeline_is_searched_with_its_microbatches_and_schedules():
    """As many microbatches as rows, and both schedules; blocks stay gathered in a pipeline."""
    stages = ("pp=4",)
    _, made, _ = suggested("llama-3.1-8b", 16, 128, 8192, settings=stages)
    for candidate in made.found.best:
        sizes = dict(candidate.mesh)
        rows = 128 // (sizes["dp_shard"] * sizes["dp_replicate"])
        assert sizes["pp"] == 4
        assert rows % dict(candidate.choice.options)["microbatches"] == 0
    schedules = {dict(c.choice.options).get("schedule") for c in made.found.best}
    assert "interleaved_1f1b" in schedules
    assert fastest(suggested("llama-3.1-8b", 16, 128, 8192)[1]) <= fastest(made)


def test_stages_of_equal_time_where_that_is_faster():
    """The last of four stages has the head, for 256,000 words; plans without stages have none."""
    space, candidates = everything("gemma-2-9b", 64, 256, 8192)
    found = {}
    for pp in (1, 4):
        sizes = dict(pp=pp, dp_replicate=1, cp=4, tp=2)
        found[pp] = candidates.candidate(space.probe(tuple(sizes.items()), {"recompute": False}))
    timed = candidates.balance_stages(found[4])
    assert timed.seconds < found[4].seconds
    assert dict(timed.choice.options)["stages"] == "balanced"
    assert '"balanced"' in timed.text and "= 8192" in timed.text
    assert candidates.balance_stages(found[1]) is None
    candidates.space = replace(space, fixed={**space.fixed, "stages": "work"})
    assert candidates.balance_stages(found[4]) is None


@pytest.mark.parametrize(
    ("model", "world_size", "rows", "tokens"),
    [("llama-3.2-1b", 64, 4, 32768), slow("qwen3-next-80b-a3b", 256, 32, 65536)],
)
def test_long_rows_are_divided_where_there_are_fewer_than_data_ranks(
    model, world_size, rows, tokens
):
    """No mesh of data and tensor ranks can split the batch: one of 8 key/value heads, say, and of
    64 ranks leaves 8 for 4 rows.
    """
    _, made, _ = suggested(model, world_size, rows, tokens)
    for candidate in made.found.best:
        sizes = dict(candidate.mesh)
        assert sizes["cp"] > 1 or sizes["pp"] > 1
        assert rows % (sizes["dp_shard"] * sizes["dp_replicate"]) == 0
    assert dict(made.found.best[0].mesh)["cp"] > 1


@pytest.mark.parametrize(
    ("least", "tried"),
    [
        ((2, 3), ["checkpoint full", "checkpoint none"]),
        ((20, 3), ["checkpoint none"]),  # too slow with the fewest micro-batches already
        ((3, inf), ["checkpoint full"]),  # too large with the most
        ((None, 3), ["checkpoint none"]),  # no such plan
    ],
)
def test_what_cannot_be_among_the_fastest_is_not_tried(least, tried, monkeypatch):
    space, candidates = everything("llama-3.1-8b", 8, 16, 8192)
    [first, *_] = space.meshes()
    of = dict(zip(("checkpoint full", "checkpoint none"), least, strict=True))
    asked = []

    def candidate(candidates, choice):
        asked.append(space.words(choice).partition(";")[0])

    monkeypatch.setattr(Candidates, "candidate", candidate)
    monkeypatch.setattr(
        Candidates, "least", lambda _, choice: of[space.words(choice).partition(";")[0]]
    )
    beside = next(space.neighbors(first))[:1]
    searching._along(candidates, beside, set(), 10, 12)
    assert asked == tried
    asked.clear()
    searching._along(candidates, beside, set(), inf, inf)  # nothing fits yet: all that is possible
    assert asked == ["checkpoint full", "checkpoint none"]


def test_the_least_time_of_a_choice():
    """That of one micro-batch, whether it fits or not; none where no number of them fits."""
    space, candidates = everything("llama-3.1-8b", 8, 32, 8192)
    choices = [space.probe(s, how) for s in space.meshes() for how in (LEANEST, FASTEST)]
    found = {c: one for c in choices if (one := candidates.candidate(c))}
    least = {c: candidates.least(c) for c in found}
    assert {one.micro_batches > 1 for one in found.values()} == {True, False}
    for choice, one in found.items():
        if one.micro_batches == 1:
            assert least[choice] == one.seconds
        else:
            assert least[choice] < one.seconds
    for memory in (8, 16, 24, 32, 48):
        candidates.hardware = replace(candidates.hardware, memory_gib=memory)
        too_large = [c for c in choices if candidates.least(c) == inf]
        assert too_large or memory > 32
        assert not any(map(candidates.candidate, too_large))


def test_meshes_that_cannot_split_the_batch_are_not_estimated():
    space, candidates = everything("llama-3.1-8b", 8, 4, 8192)
    wide = [s for s in space.meshes() if candidates.unsplit(s)]
    assert wide and not candidates.too_wide
    excluded = candidates.tally.excluded[UNSPLIT].count
    assert searching._along(candidates, wide, set(), inf, inf) == {}
    assert candidates.tally.tried == 0
    assert candidates.tally.excluded[UNSPLIT].count == excluded + len(wide)


def test_a_plan_without_other_axes_is_searched_as_it_is():
    space, _ = everything("llama-3.1-8b", 8, 16, 8192)
    assert space.optional == ("cp", "pp") and not space.sizing
    assert space.experts is None
    assert all(dict(sizes)["pp"] == 1 for sizes in space.meshes())
    [first, *_] = space.meshes()
    between = tuple((name, 4 if name == "pp" else size) for name, size in first)
    for sizes, more, fewer in ((first, [2, 4, 8], []), (between, [8], [2, 1])):
        beside = [[dict(other)["pp"] for other in some] for some in space.neighbors(sizes)]
        assert more in beside and fewer in beside


@pytest.mark.parametrize(
    ("start", "seconds", "tried"),
    [
        (10, {2: 11, 4: 10, 8: 1}, [2, 4]),  # two that are no faster
        (10, {2: 11, 4: 9, 8: 11}, [2, 4, 8]),
        (10, {2: 13, 4: 1, 8: 1}, [2]),  # one that is much slower
        (14, {2: 13, 4: 12, 8: 11}, [2, 4, 8]),
        (10, {4: 11, 8: 1}, [2, 4]),  # 2 does not fit
        (10, {2: 9, 4: 8, 8: 7}, [2, 4, 8]),
        (inf, {8: 1}, [2, 4, 8]),  # nothing fits yet
    ],
)
def test_an_axis_ends_behind_two_sizes_that_are_no_faster(start, seconds, tried, monkeypatch):
    space, candidates = everything("llama-3.1-8b", 8, 16, 8192)
    [first, *_] = space.meshes()
    asked = []

    def least(candidates, choice):
        size = dict(choice.sizes)["pp"]
        asked.extend([size] if size not in asked else [])
        return seconds.get(size, 1)

    def found(candidates, choices):
        sizes = {dict(choice.sizes)["pp"] for choice in choices}
        return {s: SimpleNamespace(seconds=seconds[s]) for s in sizes if s in seconds}

    monkeypatch.setattr(searching, "_try", found)
    monkeypatch.setattr(Candidates, "least", least)
    monkeypatch.setattr(Candidates, "legal", lambda *_: True)
    beside, near = next(space.neighbors(first)), 1.2 * start
    near_ones = {size for size in tried if seconds.get(size, inf) < near}
    assert {*searching._along(candidates, beside, set(), start, near)} == near_ones
    assert asked == tried
    assert candidates.extended == {*beside}
