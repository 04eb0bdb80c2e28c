"""Files that change, break or cannot be written between two commands: never an old verdict."""

import errno
import json
import random

import pytest
from cases import changed_text, changed_value
from console import call
from modelfolder import written

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.files import atomic_write
from planc.files.resources import PLANS, cache_folder
from planc.simulate import certificate
from planc.simulate.outcome import Discrepancy, Outcome, outcome_of

FLOW = ("--world-size", "4", "--set", "tp=2")
STRUCTURE = (*FLOW, "--level", "structure")
PROOF = {
    "format_version": 1,
    "verdict": "verified",
    "reason": None,
    "processes": 4,
    "errors": {"logits": 3e-7, "loss": 1e-8, "gradients": 9.2e-7, "parameters": 1e-6},
    "not_reached": [],
}


def proved(folder, **fields):
    """Keeps a certificate of the llama plan for the model of a folder, as `planc verify` does."""
    compiled = compile_plan(str(folder), "llama", Sink(), world_size=4, settings=["tp=2"])
    key = certificate.key_of(compiled.digest, certificate.identity(compiled.facts))
    made = {**PROOF, "lowered": compiled.digest, **fields}
    certificate.keep(made, key)
    return made, cache_folder() / f"verify-{key}.json"


def last_line(folder):
    code, out, err = call("check", folder, "llama", *STRUCTURE)
    assert "PL900" not in out + err
    return code, out.splitlines()[-1]


def test_a_model_folder_that_changed_has_no_old_verdict(home):
    folder = written(home / "model")
    proved(folder)
    assert last_line(folder) == (
        0,
        "checked: structure; Verified on 4 processes: logits 3e-7, gradients 9e-7",
    )
    written(folder, rms_norm_eps=1e-3)
    assert last_line(folder)[1].endswith("; not checked: real processes")
    written(folder)
    assert "Verified" in last_line(folder)[1]
    (folder / "config.json").unlink()
    assert last_line(folder)[0] == 2
    (folder / "config.json").write_text("{")
    assert last_line(folder)[0] == 2


def test_a_plan_that_changed_has_no_old_verdict(home):
    folder, plan = written(home / "model"), home / "own.plan"
    plan.write_text((PLANS / "llama.plan").read_text())
    proved(folder)
    assert "Verified" in call("check", folder, plan, *STRUCTURE)[1]
    plan.write_text(plan.read_text().replace("o_proj", "o_projx"))
    code, out, _ = call("check", folder, plan, *STRUCTURE)
    assert code == 1 and "Verified" not in out
    plan.write_text((PLANS / "llama.plan").read_text().replace("rowwise", "rowwise(-> partial)"))
    assert "Verified" not in call("check", folder, plan, *STRUCTURE)[1]


def test_a_refuted_certificate_is_a_finding_and_one_without_a_reason_is_none(home):
    folder = written(home / "model")
    _, path = proved(folder, verdict="refuted", reason="the gradients differ")
    code, out, _ = call("check", folder, "llama", *STRUCTURE)
    assert code == 1 and "error[PL520]: the gradients differ" in out
    found = json.loads(path.read_text())
    for reason in (None, 5, ["x"], ...):
        broken = {**found, "reason": reason}
        if reason is ...:
            del broken["reason"]
        path.write_text(json.dumps(broken))
        assert last_line(folder) == (0, "checked: structure; not checked: real processes")


def test_garbage_in_a_certificate_is_no_verdict_and_no_traceback(home):
    """What is left of it either says what it said, or nothing."""
    folder = written(home / "model")
    made, path = proved(folder)
    compiled = compile_plan(str(folder), "llama", Sink(), world_size=4, settings=["tp=2"])
    draw, dropped = random.Random(1), 0
    for number in range(400):
        text = json.dumps(made)
        if number % 2:
            text = json.dumps(changed_value(draw, json.loads(text), ("reason", "errors", "x")))
        else:
            text = changed_text(draw, text)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        found = certificate.stored_certificate(
            compiled.digest, certificate.identity(compiled.facts)
        )
        dropped += found is None
        assert found is None or certificate.summary(found).startswith(("Verified", "Refuted"))
        if number % 20 == 0:
            assert last_line(folder)[0] in (0, 1)
    assert 100 < dropped < 400
    for data in (b"", bytes(range(256)), b"[" * 100_000, b"1" * 5_000, b"null", b"{}"):
        path.write_bytes(data)
        assert last_line(folder) == (0, "checked: structure; not checked: real processes")


def test_garbage_in_a_simulated_verdict_is_no_outcome():
    found = Discrepancy(kind="output", subject="model", error=0.5, layouts=("a", "b"))
    whole = Outcome(verdict="refuted", discrepancies=(found,), modules=(("a", 0.5), ("b", None)))
    document = json.loads(json.dumps(whole.document()))
    assert outcome_of(document) == whole
    draw, kept = random.Random(1), 0
    for _ in range(3_000):
        broken = changed_value(draw, json.loads(json.dumps(document)), ("verdict", "x", "error"))
        outcome = outcome_of(broken)
        if outcome is None:
            continue
        kept += 1
        assert outcome.verdict in ("proved", "refuted", "unknown", "nothing")
        assert outcome.worst >= -1e400 or outcome.worst != outcome.worst
        assert all(isinstance(d.subject + d.detail + d.kind, str) for d in outcome.discrepancies)
    assert kept > 100


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/planc"])
def test_a_cache_that_cannot_be_written_costs_time_only(home, monkeypatch, place):
    (home / "file").write_text("")
    folder = {"a file": home / "file", "below a file": home / "file" / "below"}.get(place, place)
    monkeypatch.setenv("PLANC_CACHE_DIR", str(folder))
    code, out, err = call("check", written(home / "model"), "llama", *FLOW)
    assert (code, err) == (0, "") and "layout flow (proved" in out


def test_a_plan_folder_that_is_read_only(home, monkeypatch):
    """As a mount is: root is refused there as well."""

    def refused(path, *_):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    plan = home / "p.plan"
    plan.write_text("plan p for llama\nmesh {\ndp_shard = auto\n}\n")
    before = plan.read_text()
    monkeypatch.setattr(atomic_write, "write", refused)
    code, _, err = call("fmt", plan)
    said = "".join(err.split())  # a long path is broken over lines
    assert code == 2 and f"PL020]:cannotwrite{plan}:read-onlyfilesystem" in said
    assert plan.read_text() == before
    folder = written(home / "model")
    for words in (("lower", folder, "llama"), ("init", folder)):
        code, _, err = call(*words, "-o", home / "out")
        assert code == 2 and "PL020" in err
    assert call("check", folder, plan, "--level", "structure")[0] == 0, "reading needs no writing"
    assert not (home / "out").exists()
