"""The trial that check and verify share: what its batches show, and how its ranks end."""

import functools
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from console import call
from helpers import mutant, simulated
from torch import distributed
from torch.distributed import device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed import multi_threaded_pg
from transformers import LlamaForCausalLM

import planc
from planc.proof import judge
from planc.runtime import gradients, run
from planc.simulate import batches, program, thread_ranks
from planc.simulate.coupled_rows import UsedParameters
from planc.simulate.random_numbers import RankRandom

HALVED = """
from torch import distributed
from torch.distributed import device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class Halved(ParallelStyle):
    def _apply(self, module, device_mesh):
        group = device_mesh.get_group()

        def sum_of_two(_module, _inputs, output):
            total = output.detach().clone()
            distributed.all_reduce(total, group=group)
            return output + (total / 2 - output).detach()

        module.register_forward_hook(sum_of_two)
        return module
"""
TP = ("tp=2", "sequence=false")


def codes(findings):
    return [d.code for d in findings]


# The batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "plan", "old", "new"),
    [
        (
            "falcon-h1-0.5b",
            "falcon_h1",
            "optional mamba : input(hidden_states = shard(1) -> replicate, local = true)",
            "optional mamba : input(hidden_states = shard(1) -> replicate)",
        ),
        (
            "mamba-codestral-7b",
            "mamba2",
            "mixer : input(shard(1) -> replicate, local = true)",
            "mixer : input(shard(1) -> replicate)",
        ),
    ],
)
def test_padding_reaches_what_multiplies_by_the_mask(tmp_path, model, plan, old, new):
    assert simulated(model, plan)[0].verdict == "proved"
    verdict, findings = simulated(model, mutant(tmp_path, plan, old, new))
    assert verdict.verdict == "refuted"
    crash = next(d for d in findings if d.code == "PL503")
    assert any("in a batch with padding" in fact for fact in crash.facts)


def test_ignored_labels_that_are_uneven_need_the_count_of_all_ranks(tmp_path, monkeypatch):
    """The mean of each rank's mean, which a loop without the helper trains."""
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))

    def of_this_rank(counts, mesh):
        return torch.stack(list(counts)).sum().float()

    monkeypatch.setattr(gradients, "num_items_in_batch", of_this_rank)
    verdict, findings = simulated("llama-3.2-1b", "llama", [], world=2)
    assert verdict.verdict == "refuted"
    assert {"PL501", "PL502"} & set(codes(findings))


def test_an_auxiliary_loss_is_not_the_mean_over_the_data_ranks(tmp_path):
    import json

    from planc.files.resources import PLANS

    values = json.loads((PLANS / "models" / "mixtral-8x7b.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**values, "output_router_logits": True}))
    verdict, findings = simulated(str(path), "mixtral", TP, world=4)
    assert verdict.verdict == "proved"
    assert codes(findings) == ["PL510"]
    (label,) = findings[0].labels
    assert label.text == "dp_shard is 2" and label.span.text.startswith("dp_shard")
    assert simulated("mixtral-8x7b", "mixtral", TP, world=4)[1] == []


def test_every_copy_of_the_configuration_is_configured(tmp_path, monkeypatch):
    """T5's stacks read their own copies: a cache breaks checkpointing in the first backward."""
    import json

    from planc.runtime.safeguards import guards
    from planc.runtime.standalone import configuration

    # the safeguard of `planc.apply` turns caches off too; here the plan alone is to see to it
    monkeypatch.setattr(guards, "_disable_cache", lambda model, args, kwargs: None)
    values = {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        **{"d_model": 512, "d_ff": 1024, "d_kv": 64, "num_heads": 8, "num_layers": 6},
        **{"vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    plan = tmp_path / "t5.plan"
    plan.write_text(
        "plan t5 for t5\nmesh { dp_shard = auto }\n"
        "checkpoint { {encoder,decoder}.block.* : full }\n"
        "fsdp on dp_shard { root : unit }\n"
    )
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    model = str(tmp_path / "config.json")
    assert simulated(model, plan, [], world=2)[0].verdict == "proved"
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(
        configuration, "set_config", lambda model, path, value: setattr(model.config, path, value)
    )
    verdict, findings = simulated(model, plan, [], world=2)
    assert verdict.verdict == "refuted"
    assert codes(d for d in findings if d.severity == "error") == ["PL503"]


# Degrees and data axes ---------------------------------------------------------------------------


def test_two_ranks_cannot_tell_a_half_from_one_over_n(tmp_path, monkeypatch):
    (tmp_path / "halved_style.py").write_text(HALVED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "own.plan"
    plan.write_text(
        'plan own for llama\nstyle halved = python "halved_style:Halved"\n'
        "mesh { dp_shard = auto\n tp = 1 }\n"
        "tensor on tp { model.layers.*.mlp : halved }\n"
    )
    for degree, verdict in ((2, "proved"), (4, "refuted"), (8, "refuted")):
        found, findings = simulated(
            "llama-3.2-1b", plan, [f"tp={degree}"], world=degree, allow_code=True
        )
        assert found.verdict == verdict, (degree, findings)
    assert "PL501" in codes(findings)


def seeded(monkeypatch, tmp_path, owner, name, fault):
    """The verdict and codes on a plan, with one function of the runtime replaced."""
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(owner, name, fault)
    verdict, findings = simulated("llama-3.2-1b", "llama", ["tp=2"], world=4)
    return verdict.verdict, set(codes(findings))


def test_a_norm_that_counts_replicated_gradients_twice(monkeypatch, tmp_path):
    real = run.clip_grad_norm

    def doubled(model, max_norm, **options):
        return real(model, max_norm, **options) * 2**0.5

    found = seeded(monkeypatch, tmp_path, run, "clip_grad_norm", doubled)
    assert found == ("refuted", {"PL509"})


def test_accumulation_that_never_sends(monkeypatch, tmp_path):
    from contextlib import contextmanager

    @contextmanager
    def never(model, whole):
        for unit in gradients.fsdp_units(model):
            unit.set_requires_gradient_sync(False, recurse=False)
        yield

    verdict, found = seeded(monkeypatch, tmp_path, gradients, "no_sync", never)
    assert verdict == "refuted" and found & {"PL502", "PL503", "PL509"}


def test_a_gradient_off_by_a_factor_says_so(monkeypatch, tmp_path):
    real = gradients.num_items_in_batch
    monkeypatch.setattr(program, "MAX_NORM", float("inf"))
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gradients, "num_items_in_batch", lambda *a, **b: real(*a, **b) * 2)
    verdict, findings = simulated("llama-3.2-1b", "llama", [], world=2)
    assert verdict.verdict == "refuted"
    assert verdict.outcome.gradient == pytest.approx(0.5, abs=0.01)
    facts = [fact for d in findings for fact in d.facts]
    details = [d.detail for d in verdict.outcome.discrepancies]
    assert any("0.5 times the right one" in text for text in (*facts, *details))


# The ranks ---------------------------------------------------------------------------------------


def test_ranks_that_wait_for_each_other_are_found_at_once():
    def program_of(rank):
        if rank != 1:
            distributed.all_reduce(torch.ones(1))

    failure = thread_ranks.run_ranks(3, program_of, seconds=600)
    assert failure.error is None and "wait for each other" in failure.message


def test_ranks_that_call_different_collectives():
    def program_of(rank):
        if rank:
            distributed.all_reduce(torch.ones(1))
        else:
            distributed.broadcast(torch.ones(1), src=0)

    failure = thread_ranks.run_ranks(2, program_of, seconds=600)
    assert "different collectives" in str(failure.error)


def test_a_rank_that_raises_ends_those_that_wait_for_it():
    def program_of(rank):
        if rank == 2:
            raise ValueError("rank two is not well")
        distributed.all_reduce(torch.ones(1))

    failure = thread_ranks.run_ranks(4, program_of, seconds=600)
    assert failure.rank == 2 and "not well" in str(failure.error)
    assert not distributed.is_initialized() and not thread_ranks.busy()


def test_ranks_that_wait_for_something_else_are_given_up(monkeypatch):
    """Fifty minutes of waiting, ten times the limit by the clock, once came before the verdict."""
    monkeypatch.setattr(thread_ranks, "_IDLE", 0.5)
    event = threading.Event()
    failure = thread_ranks.run_ranks(2, lambda _: event.wait(20), seconds=300)
    event.set()
    assert failure.late and "no processor time for 0.5 seconds" in failure.message


def test_the_idle_time_of_ranks_begins_again_when_they_compute(monkeypatch):
    monkeypatch.setattr(thread_ranks, "_IDLE", 1.0)

    def rank(_):
        for _ in range(4):
            time.sleep(0.5)
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                pass

    assert thread_ranks.run_ranks(2, rank, seconds=300) is None


def test_only_processor_time_counts_for_the_limit():
    """Ranks of a busy machine end later; those of this test wait, and take no time."""
    wait = threading.Event()
    assert thread_ranks.run_ranks(2, lambda _: wait.wait(1.0), seconds=0.5) is None

    def busy(_rank):
        end = time.thread_time() + 5
        while time.thread_time() < end and not wait.is_set():
            pass

    failure = thread_ranks.run_ranks(2, busy, seconds=0.3)
    wait.set()
    assert failure.late and "0.3 seconds of processor time" in failure.message


def test_a_collective_that_begins_while_all_are_ended_is_no_error(monkeypatch):
    """torch ends collectives without a lock, and a rank that is late may begin another one."""
    groups = multi_threaded_pg.ProcessLocalGroup
    end, calls = groups.exception_handle, []

    def raced(error):
        calls.append(error)
        if len(calls) == 1:
            raise RuntimeError("dictionary changed size during iteration")
        end(error)

    monkeypatch.setattr(groups, "exception_handle", raced)
    monkeypatch.setattr(thread_ranks, "_IDLE", 0.5)
    event = threading.Event()
    failure = thread_ranks.run_ranks(2, lambda _: event.wait(20), seconds=0.2)
    event.set()
    assert failure.late and calls == [None, None]


def test_a_busy_machine_refutes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    given = dict(world_size=4, overrides="tp=2")
    (found,) = planc.check("llama-3.2-1b", "llama", **given, time_limit=0.05)
    assert found.code == "PL504" and found.severity == "warning"
    assert "time limit of 0.05 seconds of processor time" in found.message
    assert "--time-limit 0.2`" in found.help
    words = ("llama-3.2-1b", "llama", "--world-size", 4, "--set", "tp=2")
    assert "limit of 0.04 seconds" in call("check", *words, "--time-limit", 0.04)[1]
    with pytest.raises(ValueError, match="time_limit is a positive number"):
        planc.check("llama-3.2-1b", "llama", **given, time_limit=0)
    # nothing of it is kept
    assert simulated("llama-3.2-1b", "llama", ["tp=2"], world=4)[0].verdict == "proved"


def test_later_tracebacks_of_the_process_name_no_rank():
    before = sys.excepthook
    assert thread_ranks.run_ranks(2, lambda _: None, seconds=60) is None
    assert sys.excepthook is before


def test_no_rank_uses_the_shard_sizes_of_another_one_of_an_earlier_run(monkeypatch):
    """torch caches them by the number of the thread, which a later thread gets again."""
    own = threading.local()
    numbers = SimpleNamespace(get_ident=lambda: own.number, local=threading.local)
    monkeypatch.setattr(device_mesh, "threading", numbers)

    def run(order):
        def program_of(rank):
            own.number = order[rank]
            mesh = device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            whole = torch.arange(5.0)
            part = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
            half = part.redistribute(placements=[Shard(0), Replicate()])
            assert torch.equal(half.to_local(), whole.chunk(2)[rank // 2])
            assert torch.equal(half.full_tensor(), whole)

        return thread_ranks.run_ranks(4, program_of, seconds=60)

    assert run([1, 2, 3, 4]) is None
    assert run([4, 3, 2, 1]) is None


def test_every_rank_draws_from_a_generator_of_its_own():
    drawn = {}
    before = torch.get_rng_state()

    def program_of(rank):
        torch.manual_seed(rank // 2)
        distributed.barrier()
        with RankRandom():
            drawn[rank] = [torch.rand(3).tolist() for _ in range(4)]

    assert thread_ranks.run_ranks(4, program_of, seconds=60) is None
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    torch.manual_seed(0)
    assert drawn[0] == [torch.rand(3).tolist() for _ in range(4)]
    torch.set_rng_state(before)


class Raising(torch.nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, **_):
        raise self.error


REFUSALS = (
    TypeError("forward() got an unexpected keyword argument"),
    ValueError("Image features and image tokens do not match"),
    IndexError("index out of range in self"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    AttributeError("'NoneType' object has no attribute 'shape'"),
    AttributeError("'BltConfig' object has no attribute 'num_hidden_layers'"),
)
FAULTS = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    ImportError("no module named x"),
    NameError("name 'x' is not defined"),
    KeyError("x"),
    NotImplementedError('"mm" not implemented for "Half"'),
    AttributeError("'Own' object has no attribute 'norm'"),
)


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_a_model_refuses_inputs(error):
    assert not batches._runs(Raising(error), {})


@pytest.mark.parametrize("error", FAULTS, ids=repr)
def test_other_errors_say_nothing_of_the_inputs(error):
    tokens = torch.ones(2, 4).long()
    with pytest.raises(type(error)):
        batches._runs(Raising(error), {})
    with pytest.raises(type(error)):
        batches._counts(Raising(error), {"input_ids": tokens, "labels": tokens})
    single = batches.TrialPass(inputs={"input_ids": tokens})
    model = Raising(error)
    with pytest.raises(type(error)):
        UsedParameters().of_rows(model, single, lambda inputs: model(**inputs))


def test_an_error_of_a_model_with_some_inputs_leaves_the_plan_unknown(monkeypatch):
    """Before, the pass was left out, and the plan proved without packed documents."""
    forward = LlamaForCausalLM.forward

    def raising(self, *args, position_ids=None, **kwargs):
        if position_ids is not None:
            raise NameError("name 'offset' is not defined")
        return forward(self, *args, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", functools.wraps(forward)(raising))
    monkeypatch.setattr(judge.cache, "recall", lambda *_: None)
    monkeypatch.setattr(judge.cache, "keep", lambda *_: None)
    found, _ = simulated("llama-3.1-8b", "llama", ("tp=2",), world=2)
    assert found.verdict == "unknown" and "name 'offset' is not defined" in found.reason
