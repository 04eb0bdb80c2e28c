"""The numbers of `run.metrics()`, beside counts by hand; tests/runtime/test_run_metrics.py runs
them on processes.
"""

import pytest
import torch
import transformers

import planc
from planc.diagnostics.diagnostic import Sink
from planc.runtime import metrics
from planc.simulate.thread_ranks import run_ranks
from planc.tools.estimate import profiles

pytestmark = pytest.mark.usefixtures("ends_its_group")

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small(family="llama", **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def rows(count, length, seed=0):
    tokens = torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def trained(run, *steps):
    for batches in steps:
        run.forward_backward(batches)
        for parameter in run.model.parameters():
            parameter.grad = None


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    return now


def test_numbers_are_those_of_the_time_since_the_last_call(clock):
    run = planc.apply(small(), "llama", device_type="cpu", metrics=True)
    assert run.metrics() == {}
    trained(run, [rows(2, 16), rows(2, 16)], [rows(4, 8)])
    clock[0] += 4
    found = run.metrics()
    assert found["seconds_per_step"] == 2
    assert found["samples_per_second"] == 2
    assert found["tokens_per_second"] == found["tokens_per_second_per_device"] == 24
    clock[0] += 100  # such as of an evaluation
    assert run.metrics() == {}
    trained(run, [rows(1, 16)])
    clock[0] += 1
    found = run.metrics()
    assert (found["tokens_per_second"], found["tokens_seen"]) == (16, 112)


def test_padding_is_no_token_and_is_computed(clock):
    run = planc.apply(small(), "llama", device_type="cpu", metrics=True)
    found = []
    for padding in (0, 8):
        batch = rows(2, 16)
        mask = torch.ones_like(batch["input_ids"])
        mask[0, 16 - padding :] = 0
        trained(run, [batch | {"attention_mask": mask}])
        clock[0] += 1
        found.append(run.metrics())
    assert [one["tokens_per_second"] for one in found] == [32, 24]
    assert found[0]["tflops_per_device"] == found[1]["tflops_per_device"]


def test_tokens_of_ranks_with_other_rows_are_summed():
    """Rows of other lengths and numbers too: each data rank says its own."""
    models, found = [small(), small()], [None, None]

    def rank(number):
        run = planc.apply(models[number], "llama", device_type="cpu", metrics=True, compare=0)
        trained(run, [rows(1 + number, 8 + 8 * number, seed=number)])
        if number:
            found[:] = run.steps.meter.total.tolist()[:4]

    assert run_ranks(2, rank, seconds=120) is None
    assert found == [3, 8 + 32, 8 + 32, 64 + 2 * 256]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3_text"])
def test_flops_are_those_of_the_estimate(family, dtype):
    sets = {"overrides": ["param_dtype=fp32"] if dtype == torch.float32 else []}
    model = small(family).to(dtype)
    run = planc.apply(model, device_type="cpu", metrics=True, **sets)
    own = run.steps.meter.expected
    asked = planc.estimate(small(family).to(dtype), batch=4, seq=384, world_size=1, **sets)
    flops = asked.work.model_flops
    assert flops > 0
    assert own.flops(4 * 384, 4 * 384**2) == pytest.approx(flops, rel=1e-9)


def test_memory_beside_the_estimate(clock):
    model = small()
    run = planc.apply(model, "llama", device_type="cpu", metrics=True)
    run.optimizer(torch.optim.AdamW(model.parameters()))
    trained(run, [rows(2, 16)])
    clock[0] += 1
    asked = planc.estimate(small(), "llama", batch=2, seq=16, world_size=1)
    gib = asked.estimate.fullest.peak / 2**30
    assert run.metrics()["memory/estimated_gib"] == pytest.approx(gib)
    trained(run, [rows(2, 32)])  # two shapes: a peak may be of either
    clock[0] += 1
    assert "memory/estimated_gib" not in run.metrics()


def test_an_optimizer_that_the_estimate_has_not_leaves_its_memory_out(clock):
    model = small()
    run = planc.apply(model, "llama", device_type="cpu", metrics=True)
    run.optimizer(torch.optim.Adadelta(model.parameters()))
    trained(run, [rows(2, 16)])
    clock[0] += 1
    assert "memory/estimated_gib" not in run.metrics()


def test_a_device_with_an_allocator_and_a_known_peak(monkeypatch, clock):
    """torch's functions for CUDA are replaced: no GPU is here."""
    run = planc.apply(small(), "llama", device_type="cpu", metrics=True)
    meter = run.steps.meter
    said = {"max_memory_allocated": 3 * 2**30, "max_memory_reserved": 4 * 2**30}
    said |= {"get_device_name": "NVIDIA H200", "reset_peak_memory_stats": None}
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    trained(run, [rows(2, 16)])
    clock[0] += 1
    meter.device = "cuda"
    found = run.metrics()
    assert (found["memory/allocated_gib"], found["memory/reserved_gib"]) == (3, 4)
    assert found["mfu"] == pytest.approx(found["tflops_per_device"] / 989)


def test_a_peak_is_of_a_device_that_a_profile_names():
    run = planc.apply(small(), "llama", device_type="cpu", metrics=True)
    peak = run.steps.meter.expected.peak
    assert peak("NVIDIA H100 80GB HBM3") == 989e12
    assert peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak("NVIDIA H100 PCIe") is peak("cpu") is peak("") is None
    shipped = [name for name in profiles.shipped_profiles() if name != "h100-efa"]
    assert len(shipped) > 3  # h100-efa has the accelerators of h100-8x, on other links
    assert all(profiles.hardware(name, Sink()).devices for name in shipped)


def test_nothing_is_counted_unless_asked():
    run = planc.apply(small("mixtral"), "mixtral", device_type="cpu")
    assert run.steps.meter is None
    for asked in (run.metrics, run.tokens_per_expert):
        with pytest.raises(ValueError, match=r"planc\.apply\(\.\.\., metrics=True\)"):
            asked()


def test_tokens_that_a_checkpoint_routes_again_count_once():
    """And those of an evaluation not at all."""
    loads = []
    for recompute in ("true", "false"):
        model = small("mixtral")
        sets = [f"recompute={recompute}", "param_dtype=fp32"]
        run = planc.apply(model, "mixtral", device_type="cpu", metrics=True, overrides=sets)
        trained(run, [rows(2, 16)])
        run.evaluate([rows(2, 16)])
        loads.append(run.tokens_per_expert())
        total = run.steps.meter.total.tolist()
        assert [total[at] for at, _ in run.steps.meter.at.values()] == [32, 32]
    assert loads[0] == loads[1]
    assert {sum(each) for each in loads[0].values()} == {2 * 32}


LIMITED = """plan limited for any

extend "mixtral"

override expert on ep {
    $experts : dispatch(all_to_all, capacity = CAPACITY, drop = position)
}
"""


@pytest.mark.parametrize("recompute", ["true", "false"])
def test_tokens_that_find_no_slot_count(tmp_path, recompute):
    """Loads are what routers chose; the share that is dropped is of the last positions of rows."""
    path, chosen = tmp_path / "limited.plan", {}
    path.write_text(LIMITED.replace("CAPACITY", "1.0"))
    model = small("mixtral")
    sets = [f"recompute={recompute}", "param_dtype=fp32"]
    run = planc.apply(model, str(path), device_type="cpu", metrics=True, overrides=sets)
    for name in run.tokens_per_expert():

        def note(_module, args, name=name):
            chosen.setdefault(name, args[1].view(2, -1))  # of the first pass, two rows

        model.get_submodule(name).register_forward_pre_hook(note)
    trained(run, [rows(2, 16)])
    numbers = run.metrics(per_expert=True)
    for name, loads in run.tokens_per_expert().items():
        count = len(loads)
        each = torch.stack([row.bincount(minlength=count) for row in chosen[name]])
        assert [numbers[f"experts/tokens/{name}/{at}"] for at in range(count)] == loads
        assert loads == each.sum(0).tolist()
        slots = -(-each[0].sum().item() // count)
        dropped = (each - slots).clamp_min(0).sum().item() / each.sum().item()
        assert numbers[f"experts/dropped/{name}"] == pytest.approx(dropped)
    assert numbers["experts/dropped"] > 0


def test_a_pass_for_a_batch_that_is_not_there_counts_for_nothing():
    model = small("mixtral")
    sets = ["param_dtype=fp32"]
    run = planc.apply(model, "mixtral", device_type="cpu", metrics=True, overrides=sets)
    run.forward_backward([rows(2, 16)], passes=3)
    assert run.steps.meter.total.tolist()[:2] == [2, 32]
    assert {sum(each) for each in run.tokens_per_expert().values()} == {2 * 32}
