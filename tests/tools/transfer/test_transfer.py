"""Weights that reach an engine from processes: equal bit for bit to slices of exported files."""

import socket
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_engines import DENSE, EXPERTS, LLAMA, MIXTURE, by_arithmetic, serve, side_of
from transfer_jobs import ADAPTED

import planc
from planc.diagnostics.diagnostic import PlanError

pytestmark = pytest.mark.slow
TIED = {**LLAMA, "tie_word_embeddings": True}
FEWER = {**LLAMA, "num_key_value_heads": 2}
CASES = {
    "tp 2, fsdp 2 to tp 4, heads replicated": (FEWER, ["tp=2"], {"tp": 4, "kv": 2}),
    "cp 2, fsdp 2 to tp 2, two engines": (LLAMA, ["cp=2"], {"tp": 2, "kv": 4, "dp": 2}),
    "tied, pp 2, fsdp 2 to tp 2": (TIED, ["pp=2", "microbatches=2"], {"tp": 2, "kv": 4}),
    "experts, ep 2, fsdp 2 to ep 2, each over 2": (
        MIXTURE, ["ep=2"], {"tp": 2, "kv": 4, "dp": 2, "ep": 2},
    ),
    "experts, ep 2 in tp 2 to tp 4, ep 4": (
        MIXTURE, ["tp=2", "ep=2"], {"tp": 4, "kv": 4, "ep": 4},
    ),
}  # fmt: skip


def free_address():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def written(folder, config, sizes, dtype="dtype bf16"):
    """The path of a plan for an engine."""
    named = ", ".join(f"{k} = {v}" for k, v in sizes.items() if k != "kv")
    rules = DENSE + (EXPERTS if config is MIXTURE else "")
    path = folder / "rollout.plan"
    path.write_text(serve(f"on {named}, {dtype}", rules))
    return str(path)


class Engine:
    """The ranks of an engine, as threads of this process."""

    def __init__(self, address, ranks, work):
        self.results, self.errors = {}, {}
        self.threads = [
            threading.Thread(target=self._rank, args=(address, rank, work), daemon=True)
            for rank in range(ranks)
        ]
        for thread in self.threads:
            thread.start()

    def _rank(self, address, rank, work):
        try:
            self.results[rank] = work(planc.join_transfer(address, rank=rank, seconds=60), rank)
        except Exception as error:
            self.errors[rank] = error

    def join(self):
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads)


def received(times):
    """Receives as often as is asked; a copy of the tensors after each time."""

    def work(engine, _rank):
        found = []
        for time in range(times):
            assert engine.receive() == time + 1
            found.append({name: tensor.clone() for name, tensor in engine.tensors.items()})
        engine.close()
        return found

    return work


def assert_equal(tensors, files, rank, sizes):
    """A rank's tensors are slices of the files, cast to bfloat16."""
    cast = {name: tensor.bfloat16() for name, tensor in files.items()}
    wanted = by_arithmetic(cast, rank, **sizes)
    assert tensors.keys() == wanted.keys()
    wrong = [name for name in wanted if not torch.equal(tensors[name], wanted[name])]
    assert not wrong


def elements(name, tensor, at):
    """The elements of an engine's tensor without padding."""
    rows = len(tensor)
    if "embed_tokens" in name or "lm_head" in name:
        rows = min(max(LLAMA["vocab_size"] - at * rows, 0), rows)
    return rows * tensor[0].numel()


@pytest.mark.parametrize("case", CASES)
def test_separate_processes(four, tmp_path, case):
    config, sets, sizes = CASES[case]
    ranks = sizes["tp"] * sizes.get("dp", 1)
    plan, address = written(tmp_path, config, sizes), free_address()
    engine = Engine(address, ranks, received(2))
    counts = four.run(
        "transfer_jobs.publish",
        config=config, sets=sets, serve=plan, folder=str(tmp_path), address=address,
    )  # fmt: skip
    engine.join()
    assert not engine.errors
    least = 0
    for rank in range(ranks):
        for time, tensors in enumerate(engine.results[rank]):
            assert_equal(tensors, load_file(tmp_path / f"{time}/model.safetensors"), rank, sizes)
        own = engine.results[rank][0]
        least += 2 * sum(elements(*one, rank % sizes["tp"]) for one in own.items())
    sent = [bytes for bytes, *_ in counts]
    assert sum(sent) == 2 * least  # two publishes
    assert all(peak <= 8192 for *_, peak in counts)
    assert "pp" in case or max(sent) < 1.2 * min(sent)  # one stage has the embedding


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_merged_on_the_way(four, tmp_path, dora):
    sizes = {"tp": 2, "kv": 4}
    tuned = ADAPTED.replace("init = random", "init = random, dora = true") if dora else ADAPTED
    (tmp_path / "tuned.plan").write_text(tuned)
    plan, address = written(tmp_path, LLAMA, sizes), free_address()
    engine = Engine(address, 2, received(2))
    four.run(
        "transfer_jobs.publish",
        config=LLAMA, sets=["tp=2"], serve=plan, folder=str(tmp_path), address=address,
        plan=str(tmp_path / "tuned.plan"), adapters="merged",
    )  # fmt: skip
    engine.join()
    assert not engine.errors
    for rank, found in engine.results.items():
        for time, tensors in enumerate(found):
            assert_equal(tensors, load_file(tmp_path / f"{time}/model.safetensors"), rank, sizes)


def quantize(weight, block):
    """A full weight in fp8 by blocks, and the scales."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // block) * block, -(-columns // block) * block)
    padded[:rows, :columns] = weight
    blocks = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block))
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
    return (weight / spread).to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize(
    ("config", "sets", "sizes", "block", "adapted"),
    [
        (LLAMA, ["tp=2"], {"tp": 2, "kv": 4}, 16, False),
        (LLAMA, ["tp=2"], {"tp": 2, "kv": 4}, 16, True),
        (MIXTURE, ["ep=2"], {"tp": 2, "kv": 4, "dp": 2, "ep": 2}, 8, False),
    ],
)
def test_fp8_in_blocks_on_the_way(four, tmp_path, config, sets, sizes, block, adapted):
    """The bits are those of the quantized full weights, also where a block is on several ranks."""
    plan, address = written(tmp_path, config, sizes, f"fp8 = {block}, dtype bf16"), free_address()
    (tmp_path / "tuned.plan").write_text(ADAPTED)
    ranks = sizes["tp"] * sizes.get("dp", 1)
    engine = Engine(address, ranks, received(2))
    four.run(
        "transfer_jobs.publish",
        config=config, sets=sets, serve=plan, folder=str(tmp_path), address=address,
        plan=str(tmp_path / "tuned.plan") if adapted else None,
        adapters="merged" if adapted else None,
    )  # fmt: skip
    engine.join()
    assert not engine.errors
    for time in range(2):
        files = load_file(tmp_path / f"{time}/model.safetensors")
        linear = {n: t.float() for n, t in files.items() if "_proj" in n}
        made = {name: quantize(weight, block) for name, weight in linear.items()}
        weights = {name: weight.view(torch.uint8) for name, (weight, _) in made.items()}
        scales = {name: scale for name, (_, scale) in made.items()}
        for rank, found in engine.results.items():
            tensors = found[time]
            for name, wanted in by_arithmetic(weights, rank, **sizes).items():
                assert torch.equal(tensors[name].view(torch.uint8), wanted), name
            for name, wanted in by_arithmetic(scales, rank, **sizes).items():
                assert torch.equal(tensors[f"{name}_scale_inv"], wanted), name


@pytest.mark.parametrize("dtype", ["dtype bf16", "dtype fp32"])
def test_only_changes_are_sent(four, tmp_path, dtype):
    """The bits are those of the full weights; unchanged weights cost one byte for 4 KiB."""
    sizes = {"tp": 2, "kv": 4}
    plan, address = written(tmp_path, LLAMA, sizes, dtype), free_address()
    engine = Engine(address, 2, received(3))
    results = four.run(
        "transfer_jobs.publish_changes",
        config=LLAMA, sets=["tp=2"], serve=plan, folder=str(tmp_path), address=address,
    )  # fmt: skip
    engine.join()
    assert not engine.errors, engine.errors
    for rank, found in engine.results.items():
        for time, tensors in enumerate(found):
            files = load_file(tmp_path / f"{time}/model.safetensors")
            if "bf16" in dtype:
                assert_equal(tensors, files, rank, sizes)
            else:
                wanted = by_arithmetic(files, rank, **sizes)
                assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    full, some, none = (sum(sent) for sent in zip(*(sent for sent, _ in results), strict=True))
    assert 0 < none < full / 1000 and none < some < full / 4
    assert all(peak <= 2 << 16 for _, peak in results)


def test_the_same_processes(four, tmp_path):
    """What a rank has already is not sent."""
    sizes = {"tp": 4, "kv": 2}
    plan = written(tmp_path, FEWER, sizes)
    found = four.run(
        "transfer_jobs.colocated",
        config=FEWER, sets=["tp=2"], serve=plan, folder=str(tmp_path / "files"),
    )  # fmt: skip
    files = load_file(tmp_path / "files/model.safetensors")
    for rank, (tensors, sent, version) in enumerate(found):
        assert version == 2
        assert_equal(tensors, files, rank, sizes)
        assert sent < sum(tensor.nbytes for tensor in tensors.values()) * 2


def test_to_another_plan(four, tmp_path):
    """The serving side is a training plan: the engine's ranks hold its shards."""
    address = free_address()
    engine = Engine(address, 2, received(1))
    four.run(
        "transfer_jobs.to_plan", config=LLAMA, sets=["tp=2"], folder=str(tmp_path), address=address
    )
    engine.join()
    assert not engine.errors
    files = load_file(tmp_path / "0/model.safetensors")
    for rank, (tensors,) in engine.results.items():
        assert tensors.keys() == files.keys()
        for name, tensor in tensors.items():
            dim = int(tensor.shape != files[name].shape and len(tensor) == len(files[name]))
            size = -(-files[name].shape[dim] // 2) if tensor.shape != files[name].shape else None
            full = files[name] if size is None else files[name].split(size, dim)[rank]
            assert torch.equal(tensor, full), name


def test_a_rank_that_leaves(four, tmp_path):
    """The others raise, with the rank; the engine's weights are marked as incomplete."""
    sizes = {"tp": 2, "kv": 4}
    plan, address = written(tmp_path, LLAMA, sizes), free_address()

    def work(engine, _rank):
        engine.receive()
        with pytest.raises(PlanError, match="PL698") as raised:
            engine.receive()
        with pytest.raises(PlanError, match="PL698"):
            _ = engine.tensors
        assert engine.version == 1
        return str(raised.value)

    engine = Engine(address, 2, work)
    texts = four.run(
        "transfer_jobs.stopped",
        config=LLAMA, sets=["tp=2"], serve=plan, address=address, rank=3,
    )  # fmt: skip
    engine.join()
    assert not engine.errors
    assert texts.pop(3) == "" and all("PL698" in text for text in texts)
    said = [*texts, *engine.results.values()]
    assert any("rank 3 of the training run stopped in bucket" in text for text in said), said


def test_an_engine_that_leaves(four, tmp_path):
    sizes = {"tp": 2, "kv": 4}
    plan, address = written(tmp_path, LLAMA, sizes), free_address()

    def work(engine, rank):
        engine.receive()
        if rank == 1:
            engine.close()
            return ""
        with pytest.raises(PlanError, match="PL698"):
            engine.receive()
        return "raised"

    engine = Engine(address, 2, work)
    texts = four.run(
        "transfer_jobs.stopped",
        config=LLAMA, sets=["tp=2"], serve=plan, address=address, rank=-1,
    )  # fmt: skip
    engine.join()
    assert engine.results == {0: "raised", 1: ""} and not engine.errors
    assert all("PL698" in text for text in texts)
    assert any("rank 1 of the engine stopped in bucket" in text for text in texts), texts


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("lm_head.weight", None, "the engine lacks lm_head.weight"),
        ("rotary.weight", torch.zeros(3), "the table lacks rotary.weight"),
        ("model.norm.weight", torch.zeros(64), "is [64] float32, and the table has [64] bfloat16"),
    ],
)
def test_an_engine_that_does_not_fit(four, tmp_path, name, change, words):
    """All ranks of both sides raise, before the first byte."""
    sizes = {"tp": 2, "kv": 4}
    plan, address = written(tmp_path, LLAMA, sizes), free_address()
    side = side_of(LLAMA, Path(plan).read_text())
    errors = {}

    def rank(number):
        own = side.tensors_of(number).items()
        tensors = {n: torch.zeros(t.shape, dtype=torch.bfloat16) for n, t in own}
        tensors[name] = change
        tensors = {n: t for n, t in tensors.items() if t is not None}
        try:
            planc.join_transfer(address, rank=number, tensors=tensors, seconds=60)
        except PlanError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in range(2)]
    for thread in threads:
        thread.start()
    texts = four.run(
        "transfer_jobs.refused", config=LLAMA, sets=["tp=2"], serve=plan, address=address
    )
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2
    assert all("PL697" in text and words in text for text in (*texts, *errors.values()))
