"""The table of a transfer: coverage, buckets, the command, and faults that bits must show."""

import json
import random
from dataclasses import replace

import jsonschema
import pytest
import torch
from console import call
from tiny_engines import (
    DENSE,
    EXPERTS,
    LLAMA,
    MIXTURE,
    by_arithmetic,
    facts_of,
    files_of,
    serve,
    side_of,
)

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.files.resources import GRAMMARS
from planc.ir.patches import cover, subtract, volume
from planc.runtime.transfer import _engine_faults
from planc.tools.transfer.document import digest, document, table_from, traffic_of
from planc.tools.transfer.held import training_side
from planc.tools.transfer.table import MissingError, buckets, table_of

NAMES = {"model": "m", "source": "s", "target": "t"}


def training(config, world, *sets):
    done = compile_plan(facts_of(config), None, sink := Sink(), world_size=world, settings=sets)
    assert not sink.has_errors
    return training_side(done.plan, done.facts)


def run(table, sources, targets, files, most=1 << 30):
    """What all ranks of the targets get if a table is run in one process, and how often."""
    got, written = {}, {}
    for rank in range(targets.size):
        for name, tensor in targets.tensors_of(rank).items():
            got[rank, name] = torch.zeros(tensor.shape, dtype=torch.int64)
            written[rank, name] = torch.zeros(tensor.shape, dtype=torch.int64)
    local = shards_of(sources, files)
    for bucket in buckets(table, most):
        for part in bucket:
            index = part.flow.indices[part.layer]
            for move, source, target in part.flow.pairs(part.layer):
                if (box := part.block(move)) is None:
                    continue
                block = local[source, move.of.key.format(*index)][slices(move.of.part(box))]
                key = target, move.to.key.format(*index)
                where = slices(move.to.part(box))
                in_order(got[key][where], move.to).copy_(in_order(block, move.of))
                written[key][where] += 1
    return got, written


def slices(box):
    return tuple(slice(*one) for one in box)


def in_order(block, patch):
    """A block in the order of the file's dims."""
    kept = [dim for dim in patch.dims if dim is not None]
    block = block.squeeze([at for at, dim in enumerate(patch.dims) if dim is None])
    return block.permute([kept.index(dim) for dim in sorted(kept)])


def shards_of(sources, files):
    """The tensors of all ranks of a training plan."""
    local = {}
    for rank in range(sources.size):
        for name, tensor in sources.tensors_of(rank).items():
            local[rank, name] = torch.zeros(tensor.shape, dtype=torch.int64)
    for held in sources.held:
        for index in held.indices:
            block = files[held.patch.hub.format(*index)][slices(held.patch.box)]
            for rank in held.ranks:
                tensor = local[rank, held.patch.key.format(*index)][slices(held.patch.local)]
                in_order(tensor, held.patch).copy_(block)
    return local


def expected(targets, files):
    """What the ranks of the targets hold, without a table."""
    return shards_of(targets, files)


CASES = {
    "tp 2 to tp 4": (LLAMA, 4, ["tp=2"], "on tp = 4", DENSE),
    "uneven": (LLAMA, 3, [], "on tp = 2", DENSE),
    "replicas": (LLAMA, 8, ["tp=2", "dp_replicate=2"], "on tp = 2, dp = 2", DENSE),
    "stages": (LLAMA, 4, ["pp=2", "microbatches=2"], "on tp = 2", DENSE),
    "experts": (MIXTURE, 8, ["tp=2", "ep=4"], "on tp = 2, dp = 2, ep = 2", DENSE + EXPERTS),
    "uneven experts": (MIXTURE, 4, ["ep=2"], "on dp = 3, ep = 3", DENSE + EXPERTS),
}


def sides(case):
    config, world, sets, sizes, rules = CASES[case]
    return training(config, world, *sets), side_of(config, serve(sizes, rules))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("most", [1 << 30, 1000])
def test_each_element_is_written_once(case, most):
    sources, targets = sides(case)
    files = files_of(sources)
    table = table_of(sources, targets)
    got, written = run(table, sources, targets, files, most)
    wanted = expected(targets, files)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], wanted[key]) for key in got)
    assert all((counts == (got[key] != 0)).all() for key, counts in written.items())


@pytest.mark.parametrize("case", CASES)
def test_buckets_are_bounded_and_bytes_the_least(case):
    sources, targets = sides(case)
    table, loads = table_of(sources, targets), []
    assert sum(1 for _ in buckets(table, 3000, loads.append)) == len(loads) > 5
    assert max(load.most for load in loads) <= 3000
    traffic = traffic_of(table, 3000)
    wanted = sum(
        volume(held.patch.box) * len(held.ranks) * len(held.indices) * 4 for held in targets.held
    )
    assert traffic.bytes == sum(traffic.received.values()) == wanted
    assert traffic.messages == sum(load.pairs.bit_count() for load in loads)


def test_stages_send_from_the_beginning():
    sources, targets = sides("stages")
    first = next(buckets(table_of(sources, targets), 3000))
    assert len({part.flow.moves[0].sources[0] // 2 for part in first}) == 2


def test_what_a_process_has_is_not_sent():
    sources, targets = sides("tp 2 to tp 4")
    apart = traffic_of(table_of(sources, targets), 1 << 20)
    same = traffic_of(table_of(sources, targets, {n: n for n in range(4)}), 1 << 20)
    assert 0 < same.bytes < apart.bytes


def test_a_source_that_lacks_a_tensor():
    sources, targets = sides("uneven")
    less = [held for held in sources.held if "o_proj" not in held.patch.hub]
    with pytest.raises(MissingError, match="no rank holds model"):
        table_of(replace(sources, held=tuple(less)), targets)
    less = [held for held in sources.held if held.ranks != (2,)]
    with pytest.raises(MissingError, match="which rank 0 needs"):
        table_of(replace(sources, held=tuple(less)), targets)


def test_random_plans_of_both_sides():
    """Between any two meshes of the family's plan."""
    choose = random.Random(0)
    meshes = [(2, "tp=2"), (3,), (4, "tp=2"), (4, "tp=4"), (8, "tp=2", "dp_replicate=2")]
    for config in (LLAMA, MIXTURE):
        more = [(4, "ep=2"), (4, "tp=2", "ep=4")] if config is MIXTURE else [(4, "cp=2")]
        for _ in range(4):
            one, other = (training(config, *choose.choice(meshes + more)) for _ in range(2))
            files = files_of(one)
            got, _ = run(table_of(one, other), one, other, files, most=5000)
            wanted = expected(other, files)
            assert all(torch.equal(got[key], wanted[key]) for key in wanted)


MUTANTS = {
    "swapped parts": DENSE.replace("gate_proj, up_proj", "up_proj, gate_proj"),
    "keys and values swapped": DENSE.replace("k_proj, v_proj", "v_proj, k_proj"),
    "columns for rows": DENSE.replace(
        "self_attn.o_proj                : row", "self_attn.o_proj : column"
    ),
    "a vocabulary without padding": DENSE.replace(", lm_head           : vocab", " : vocab"),
    "experts' parts swapped": DENSE + EXPERTS.replace("gate_proj, up_proj", "up_proj, gate_proj"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_shows_in_bits(name):
    """A table of wrong rules fills the engine with other bits, or other shapes."""
    config = MIXTURE if "experts" in name else LLAMA
    sources = training(config, 4, "tp=2")
    targets = side_of(config, serve("on tp = 2", MUTANTS[name]))
    files = files_of(sources)
    got, _ = run(table_of(sources, targets), sources, targets, files)
    wrong = []
    for rank in range(2):
        for key, tensor in by_arithmetic(files, rank, tp=2, kv=4).items():
            other = got.get((rank, key))
            if other is None or other.shape != tensor.shape or not torch.equal(other, tensor):
                wrong.append(key)
    assert wrong


def with_keys_in_turn(held):
    """The key-value heads in turn: ranks 0 and 2 have the first, instead of 0 and 1."""
    if held.patch.hub.rpartition(".")[0].endswith(("k_proj", "v_proj")):
        return replace(held, ranks=tuple(rank // 2 + rank % 2 * 2 for rank in held.ranks))
    return held


def with_experts_in_turn(held):
    """Expert n in group n % 2, instead of n // 4."""
    if held.patch.dims[0] is not None:
        return held
    number = int(held.patch.hub.partition(".experts.")[2].partition(".")[0])
    start = (number // 2, number // 2 + 1)
    patch = replace(held.patch, local=(start, *held.patch.local[1:]))
    return replace(held, patch=patch, ranks=(number % 2 * 2 + held.ranks[0] % 2,))


def without_padding(held):
    """The 131 rows of a vocabulary halved, instead of the 192 padded ones."""
    if "lm_head" not in held.patch.hub:
        return held
    start, stop = [(0, 66), (66, 131)][held.ranks[0] % 2]
    (_, columns), (_, local) = held.patch.box, held.patch.local
    patch = replace(held.patch, box=((start, stop), columns), local=((0, stop - start), local))
    return replace(held, patch=patch)


LAYOUTS = {
    "wrong key-value head": (with_keys_in_turn, {"tp": 4, "kv": 2}),
    "experts in turn": (with_experts_in_turn, {"tp": 2, "dp": 2, "ep": 2, "kv": 4}),
    "a vocabulary without padding": (without_padding, {"tp": 2, "kv": 4}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_wrong_layout_shows_in_bits(name):
    """Layouts that fill all tensors of an engine, which no comparison of shapes finds."""
    change, sizes = LAYOUTS[name]
    mixture = "ep" in sizes
    config = {**(MIXTURE if mixture else LLAMA), "num_key_value_heads": sizes["kv"]}
    sources = training(config, 4, "tp=2")
    on = ", ".join(f"{size} = {n}" for size, n in sizes.items() if size != "kv")
    targets = side_of(config, serve(f"on {on}", DENSE + EXPERTS * mixture))
    files, found = files_of(sources), {}
    for changed in (False, True):
        held = tuple(map(change, targets.held)) if changed else targets.held
        got, _ = run(table_of(sources, other := replace(targets, held=held)), sources, other, files)
        found[changed] = [
            key
            for rank in range(targets.size)
            for key, tensor in by_arithmetic(files, rank, **sizes).items()
            if not torch.equal(got[rank, key], tensor)
        ]
    assert found[True] and not found[False]


def test_a_forgotten_part_is_refused():
    """A rule without `up_proj`: the engine's tensors have other names and shapes."""
    wrong = side_of(LLAMA, serve("on tp = 2", DENSE.replace("gate_proj, up_proj", "gate_proj")))
    right = side_of(LLAMA, serve("on tp = 2"))
    tensors = {
        name: torch.empty(one.shape, dtype=torch.float32)
        for name, one in right.tensors_of(1).items()
    }
    assert not _engine_faults(tensors, right.tensors_of(1))
    assert "gate_up_proj.weight is [96, 64]" in _engine_faults(tensors, wrong.tensors_of(1))


def test_boxes():
    box = ((0, 10), (0, 6))
    block = ((2, 5), (1, 6))
    rest = [*subtract(box, block)]
    assert sum(map(volume, rest)) == 60 - 15
    blocks, left = cover([((0, 6), (0, 6)), ((4, 10), (0, 6))], box)
    assert not left and [volume(b) for _, b in blocks] == [36, 24]
    assert cover([((0, 6), (0, 6))], box)[1] == [((6, 10), (0, 6))]


def test_json_has_the_whole_table():
    sources, targets = sides("experts")
    table = table_of(sources, targets)
    text = json.loads(json.dumps(document(table, traffic_of(table, 1000), NAMES)))
    schema = json.loads((GRAMMARS / "transfer.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(text)
    again = table_from(text)
    assert digest(again) == digest(table) == text["digest"]
    assert digest(table_of(sources, targets, {0: 0})) != text["digest"]


def test_the_command(tmp_path):
    plan = tmp_path / "rollout.plan"
    plan.write_text('plan r for llama\nextend "serve/vllm.plan"\nserve vllm on dtype bf16 {\n}\n')
    words = ("transfer", "llama-3.2-1b", "llama", plan, "--world-size", "8")
    code, text, errors = call(*words, "--set", "tp=2", "--set", "serve.tp=4")
    assert code == 0 and not errors
    assert "llama, 8 ranks -> vllm 0.33, 4 ranks" in text
    assert "qkv_proj.weight        q_proj, k_proj, v_proj" in text
    code, text, _ = call(*words, "--format", "json", "--bucket", "64MiB")
    found = json.loads(text)
    assert found["traffic"]["bytes"] == sum(found["traffic"]["sent"])
    answer = planc.transfer_table("llama-3.2-1b", "llama", plan, world_size=8, bucket=64 << 20)
    assert json.loads(json.dumps(answer.document)) == found
    code, _, errors = call(*words, "--set", "serve.tp=3")
    assert code == 1 and "PL692" in errors
    code, _, errors = call(*words[:2], "llama", "llama", *words[4:], "--serve-world-size", "4")
    assert code == 0
