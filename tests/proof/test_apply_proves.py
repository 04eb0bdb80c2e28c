"""`apply(prove=True)` proves a plan of which nothing is known, apart from the run."""

import logging
import os
import sys
import time

import pytest
import torch
from modelfolder import CONFIG
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

import planc
from planc.answers import apply
from planc.answers.target import module_facts
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.model.facts import Facts
from planc.proof import in_subprocess
from planc.runtime import uncaught
from planc.runtime.known_verdict import KnownVerdict, accept
from planc.runtime.preconditions import stop

RIGHT = 'plan t for llama\nextend "llama"\n'
SUM = "model.layers.*.self_attn.o_proj : rowwise(-> partial)"
UNREDUCED = f"""{RIGHT}override tensor on tp {{
    model.layers.*.self_attn.{{q,k,v}}_proj : colwise
    {SUM}
}}
"""


def model():
    fields = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    return LlamaForCausalLM(LlamaConfig(**fields))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def compiled(folder, text):
    (folder / "t.plan").write_text(text)
    facts, sink = module_facts(model()), Sink()
    assert isinstance(facts, Facts)
    settings = ["tp=2", "sequence=false"]
    return compile_plan(facts, str(folder / "t.plan"), sink, world_size=2, settings=settings)


@pytest.mark.parametrize(("text", "level"), [(RIGHT, "proved"), (UNREDUCED, "refuted")])
def test_the_verdict_is_that_of_a_check(home, text, level, monkeypatch):
    """In the environment of a rank, and without drawing its random numbers."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    case = compiled(home, text)
    before = torch.get_rng_state()
    found = in_subprocess.prove_in_subprocess(case, allow_code=False)
    assert found.level == level, found
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.distributed.is_initialized()


def test_what_fails_is_not_decided(home, monkeypatch):
    case = compiled(home, RIGHT)
    monkeypatch.setattr(in_subprocess, "SECONDS", 1)  # importing torch takes longer
    found = in_subprocess.prove_in_subprocess(case, allow_code=False)
    assert found.level == "undecided"
    assert "no answer within 1 seconds of processor time; prove it before the run" in found.text
    assert "`planc check --time-limit" in found.text
    monkeypatch.setattr(in_subprocess, "SECONDS", 60)
    monkeypatch.setattr(in_subprocess, "WAIT", 0.01)
    found = in_subprocess.prove_in_subprocess(case, allow_code=False)
    assert "no answer in 0.01 s, for which other ranks wait; prove it" in found.text
    monkeypatch.setattr(in_subprocess, "WAIT", 60)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = in_subprocess.prove_in_subprocess(case, allow_code=False)
    assert found.level == "undecided" and "exit status" in found.text


def test_a_copy_of_the_process_that_gives_no_answer(monkeypatch):
    def answer(function):
        with pytest.raises(in_subprocess.NoAnswerError) as caught:
            in_subprocess.answer_of_copy(function)
        return str(caught.value)

    assert in_subprocess.answer_of_copy(lambda: [os.environ.get("RANK"), 2]) == [None, 2]
    assert answer(lambda: 1 / 0) == "ZeroDivisionError: division by zero"
    assert answer(lambda: os._exit(3)) == "exit status 3"
    monkeypatch.setattr(in_subprocess, "WAIT", 0.2)
    assert answer(lambda: time.sleep(60)) == "no answer in 0.2 s, for which other ranks wait"


def test_the_time_limit_of_a_copy_is_processor_time(monkeypatch):
    """A process that waits, as on a busy machine, is not late; one that computes is."""
    monkeypatch.setattr(in_subprocess, "SECONDS", 1)
    assert in_subprocess.answer_of_copy(lambda: time.sleep(1.5) or 7) == 7

    def compute():
        while True:
            pass

    with pytest.raises(in_subprocess.NoAnswerError, match="within 1 seconds of processor time"):
        in_subprocess.answer_of_copy(compute)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_proves_and_the_others_say_that_they_wait(home, rank, monkeypatch, caplog):
    monkeypatch.setenv("RANK", str(rank))
    caplog.set_level(logging.INFO, "planc")
    monkeypatch.setattr(
        in_subprocess,
        "prove_in_subprocess",
        lambda *_, **__: KnownVerdict(level="proved", text="proved apart"),
    )
    known = KnownVerdict(level="unproved", text="never proved")
    found = apply._proved_by_rank_0(compiled(home, RIGHT), known, False)
    assert found.level == ("unproved" if rank else "proved")
    assert ("rank 1 waits" in caplog.text) == bool(rank)


def test_apply_asks_only_where_nothing_is_known(home, monkeypatch):
    asked = []

    def prove(case, *, allow_code):
        asked.append(case)
        return KnownVerdict(level="refuted", text="its numbers are wrong")

    monkeypatch.setattr(in_subprocess, "prove_in_subprocess", prove)
    (home / "t.plan").write_text(RIGHT)
    with pytest.raises(PlanError, match="PL480"):
        planc.apply(model(), str(home / "t.plan"), prove=True)
    planc.apply(model(), str(home / "t.plan"))
    planc.check(model(), str(home / "t.plan"), world_size=1)
    planc.apply(model(), str(home / "t.plan"), prove=True, require="proved")
    assert len(asked) == 1
    torch.distributed.destroy_process_group()


def test_a_lowered_plan_cannot_be_proved(home):
    (home / "t.plan").write_text(RIGHT)
    lowered = planc.lower(model(), str(home / "t.plan"), world_size=1)
    with pytest.raises(ValueError, match="prove takes the plan by its path"):
        planc.apply(model(), lowered, prove=True)


@pytest.mark.parametrize(("rank", "reports"), [(0, True), (2, False)])
def test_an_uncaught_error_is_printed_once(rank, reports, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(uncaught, "_SECONDS", 0)
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("a traceback", file=sys.stderr))
    refuted = KnownVerdict(level="refuted", text="mine.plan:3:5: its gradient is wrong (PL502)")
    with pytest.raises(PlanError) as caught, uncaught.print_errors_once():
        accept(refuted, None)
    sys.excepthook(PlanError, caught.value, caught.tb)
    told = capsys.readouterr().err
    if reports:
        assert "test_apply_proves.py:" in told.splitlines()[0] and "PL480" in told
        assert "mine.plan:3:5: its gradient is wrong (PL502)" in told
    else:
        assert told == "planc: rank 2 ends with the error that rank 0 reports\n"
    sys.excepthook(ValueError, ValueError(), None)
    assert capsys.readouterr().err == "a traceback\n"


def test_an_uncaught_error_of_a_step_is_printed_by_the_first_rank(monkeypatch, capsys):
    """The hook is installed by `apply`, and ranks raise on their own afterwards."""
    store = distributed.HashStore()
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(uncaught, "_SECONDS", 0)

    def told(rank, message):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(sys, "excepthook", lambda *_: print("a traceback", file=sys.stderr))
        with uncaught.print_errors_once():
            pass
        with pytest.raises(PlanError) as caught:
            raise stop("PL483", message)
        sys.excepthook(PlanError, caught.value, caught.tb)
        return capsys.readouterr().err

    first = told(1, "the ranks have different inputs")
    assert first.startswith(f"{__file__}:") and "error[PL483]: the ranks have different" in first
    same = told(0, "the ranks have different inputs")
    assert same == "planc: rank 0 ends with the error that rank 1 reports\n"
    other = told(2, "rank 2 has none")
    assert other == "planc: rank 2 ends after rank 1, with error[PL483]: rank 2 has none\n"


def test_one_process_keeps_its_traceback(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    before = sys.excepthook
    with pytest.raises(PlanError), uncaught.print_errors_once():
        raise PlanError([])
    assert sys.excepthook is before
