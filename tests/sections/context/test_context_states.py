"""States that go from token to token over ranks as threads, beside one process, in float64."""

import copy

import pytest
import state_jobs
import torch
from helpers import sampled
from state_jobs import limit
from torch.distributed.device_mesh import init_device_mesh

from planc.model.recurrent_states import UPDATES
from planc.runtime.standalone import context as parallel
from planc.runtime.standalone import context_states, documents
from planc.runtime.standalone.context_states import EXCHANGES, StateRanks
from planc.runtime.standalone.documents import FUSED, TOKENS
from planc.simulate.thread_ranks import run_ranks

FAMILIES = (
    *("qwen3_next", "bamba", "mamba", "recurrent_gemma", "rwkv", "zaya", "minimax", "lfm2"),
    *("kimi_linear", "bailing_hybrid", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
    *("mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "xlstm"),
    *("lfm2_moe", "lfm3", "zamba", "zamba2"),
)


def worst(family, kind="plain", length=136, ranks=4, **settings):
    """The largest error of all ranks."""
    settings = {"attention": "all_gather", "balance": "none", "exchange": "state", **settings}
    with state_jobs.float64():
        single, states = state_jobs.made(family)
        models, found = [copy.deepcopy(single) for _ in range(ranks)], []
        whole = state_jobs.batch(single, kind, length)
        right = state_jobs.single(single, states, whole)

        def rank(number):
            mesh = init_device_mesh("cpu", (ranks,))
            found.append(
                state_jobs.error(models[number], whole, right, mesh, states=states, **settings)
            )

        failure = run_ranks(ranks, rank, seconds=300)
    assert failure is None, failure
    return max(found)


@pytest.mark.parametrize(
    ("family", "kind", "balance"),
    sampled(
        [(f, k, b) for f in FAMILIES for k in ("plain", "mixed") for b in ("none", "head_tail")],
        every=6,
    ),
)
def test_states(family, kind, balance):
    assert worst(family, kind, balance=balance) < limit(family)


@pytest.mark.parametrize(
    ("family", "balance", "exchange"),
    sampled(
        [(f, b, e) for f in FAMILIES for b in ("none", "head_tail") for e in ("state", "gather")],
        every=10,
    ),
)
def test_packed_documents(family, balance, exchange):
    assert worst(family, "packed", balance=balance, exchange=exchange) < limit(family)


@pytest.mark.parametrize("balance", ["none", "head_tail"])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "mamba", "zaya", "rwkv"])
def test_runs_that_are_shorter_than_a_convolution(family, balance):
    """One token each with `head_tail`; with one token a rank, no mask is left out."""
    assert worst(family, length=16, balance=balance) < limit(family)
    assert worst(family, length=8, balance=balance) < limit(family)
    assert worst(family, "left", length=4, balance="none") < limit(family)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("exchange", ["state", "gather"])
@pytest.mark.parametrize("family", ["qwen3_next", "recurrent_gemma", "minimax"])
def test_checkpoints_compute_states_again(family, exchange, reentrant):
    for kind in ("mixed", "packed"):
        found = worst(family, kind, ranks=2, exchange=exchange, reentrant=reentrant)
        assert found < limit(family), kind


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_beside_other_attention(attention):
    assert worst("bamba", "mixed", attention=attention, balance="head_tail") < limit("bamba")


def test_in_float32_one_process_is_as_far_from_the_truth():
    """What limits of 1e-5 would refuse: so all of these tests compute in float64."""
    model, states = state_jobs.made("qwen3_5_text")
    whole = state_jobs.batch(model, "plain", 136)
    _, rounded = state_jobs.single(copy.deepcopy(model).float(), states, whole)
    with state_jobs.float64():
        _, right = state_jobs.single(model, states, whole)
    far = {n: float((rounded[n] - g).abs().max() / g.abs().max()) for n, g in right.items()}
    assert max(v for n, v in far.items() if "A_log" in n) > 1e-6


# What the proof and these tests would see ---------------------------------------------------------


def none_handed_on(monkeypatch):
    monkeypatch.setattr(StateRanks, "states", lambda _, start, *__: start)


def nothing_before(monkeypatch):
    plain = StateRanks.with_before

    def zeros(self, value, dim, width, before):
        runs = plain(self, value, dim, width, before)
        for run, some in zip(runs, before, strict=True):
            if isinstance(run, torch.Tensor) and self.has(value, dim):
                run.narrow(dim, 0, some).data.zero_()
        return runs

    monkeypatch.setattr(StateRanks, "with_before", zeros)


def runs_in_the_order_of_ranks(monkeypatch):
    plain = StateRanks.__init__

    def unordered(self, *args):
        plain(self, *args)
        self.order = torch.arange(len(self.order))

    monkeypatch.setattr(StateRanks, "__init__", unordered)


def states_of_the_last_rank_alone(monkeypatch):
    """T is forgotten: a run begins with what the one before it made of no state."""
    plain = StateRanks.states

    def last(self, start, step, *made):
        return plain(self, start, lambda _, *of: step(start[: self.rows], *of), *made)

    monkeypatch.setattr(StateRanks, "states", last)


def documents_unseen(monkeypatch):
    monkeypatch.setattr(parallel.ContextParallel, "_documents", lambda *_: None)


def padding_unseen(monkeypatch):
    monkeypatch.setattr(documents, "UNMASKED", ())
    monkeypatch.setattr(parallel, "UNMASKED", ())


FAULTS = [
    ("no state is handed on", none_handed_on, "bamba", "plain"),
    ("no state is handed on", none_handed_on, "rwkv", "plain"),
    ("a convolution sees no tokens before", nothing_before, "bamba", "plain"),
    ("a convolution sees no tokens before", nothing_before, "zaya", "plain"),
    ("runs are ordered by rank", runs_in_the_order_of_ranks, "qwen3_next", "plain"),
    ("states go one rank far", states_of_the_last_rank_alone, "qwen3_next", "plain"),
    ("states go one rank far", states_of_the_last_rank_alone, "mamba", "plain"),
    ("states go on in the next document", documents_unseen, "lfm2", "packed"),
]


@pytest.mark.parametrize(("fault", "family", "kind"), [case[1:] for case in FAULTS])
def test_faults_show(fault, family, kind, monkeypatch):
    fault(monkeypatch)
    # runs of two tokens: after many more a small model has forgotten what it began with
    assert worst(family, kind, 16, balance="head_tail") > 1e-6


def test_another_function_that_hands_states_on_is_refused(monkeypatch):
    """As a kernel of a whole layer is, which calls nothing that is replaced."""
    monkeypatch.setattr(
        context_states.StateRanks, "run_recurrence", lambda _, f, __, a, k: f(*a, **k)
    )
    with pytest.raises(AssertionError, match="a function that is not transformers'"):
        worst("bamba", ranks=2)


def test_each_way_is_for_what_hands_states_on():
    assert {*EXCHANGES} <= {*TOKENS}
    assert {part for parts in UPDATES.values() for part in parts} == {*TOKENS}
    assert not {*FUSED} & {*TOKENS}
