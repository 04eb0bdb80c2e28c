"""`planc verify` on real processes: it proves, refutes, and ends cleanly however it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from helpers import STATED, facts, lowered, slow

import planc
from planc.cli import main
from planc.diagnostics.diagnostic import Sink
from planc.files.resources import GRAMMARS, PLANS
from planc.model import cache
from planc.model.load import load
from planc.proof.verify import verify
from planc.simulate import certificate as store
from planc.simulate import launcher as runtime
from planc.simulate import verdict_store
from planc.simulate.launcher import _waiting
from planc.simulate.verdict_store import recall

pytestmark = pytest.mark.slow

SCHEMA = json.loads((GRAMMARS / "certificate.schema.json").read_text())
COMMAND = [sys.executable, "-W", "ignore", "-m", "planc.cli", "verify"]


def processes(session=None):
    """The live processes of a session, or all, as {pid: (parent, session)}."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and session in (None, int(fields[3])):
            found[int(path.parent.name)] = (int(fields[1]), int(fields[3]))
    return found


def children(process):
    """The processes that a process forked, asked for cheaply: a proof may last a second."""
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def started(process, count, seconds=120):
    """The fork_server of a running command and its ranks, once there are so many."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        for fork_server in children(process.pid):
            ranks = children(fork_server)
            if len(ranks) == count:
                return fork_server, sorted(ranks)
        time.sleep(0.002)
    process.kill()
    pytest.fail(f"there were no {count} ranks: {process.communicate()}")


def gone(session, seconds=30):
    end = time.monotonic() + seconds
    while processes(session) and time.monotonic() < end:
        time.sleep(0.05)
    return not processes(session)


@pytest.fixture
def command(tmp_path):
    """Starts `planc verify` on a plan that takes a while; killed at the end, whatever happened."""
    running = []

    def start(*words):
        process = subprocess.Popen(
            [*COMMAND, "llama-3.1-8b", "llama", "--set", "tp=2", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            # a shell's background job leaves its children deaf to SIGINT
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            env={**os.environ, "TMPDIR": str(tmp_path), "PLANC_CACHE_DIR": str(tmp_path / "cache")},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def proved(model, plan, **arguments):
    sink = Sink()
    found = verify(model, str(plan), sink, **arguments)
    if found.certificate is not None:
        jsonschema.validate(found.certificate, SCHEMA)
    return found, sink


def plan_of(folder, text):
    path = folder / "example.plan"
    path.write_text(text)
    return path


# What it says ------------------------------------------------------------------------------------


def test_llama_is_verified(tmp_path, capsys):
    written = tmp_path / "llama.json"
    words = ["llama-3.1-8b", "llama", "--world-size", "64", "--set", "tp=8"]
    assert main(["verify", *words, "--certificate", str(written)]) == 0
    told = capsys.readouterr().out
    assert "Verified on 4 processes: logits " in told
    assert "dp_shard 2 | tp 2" in told
    found = json.loads(written.read_text())
    jsonschema.validate(found, SCHEMA)
    assert found["verdict"] == "verified" and found["first"] is None
    assert 0 < found["errors"]["gradients"] < 1e-5 and found["errors"]["parameters"] < 1e-3
    assert found["small"]["config"]["num_attention_heads"] == 8
    assert found["left_out"] == ["mixed precision: everything runs in float32"]
    assert list(tmp_path.iterdir()) == [written]
    # check knows of it, for this lowered plan alone
    assert main(["check", *words]) == 0
    assert f"; {store.summary(found)}; not checked: mixed precision\n" in capsys.readouterr().out
    assert main(["check", *words[:-1], "tp=4"]) == 0
    assert "Verified" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("qwen3-8b", "qwen3"),
        ("phi-3-mini", "phi3"),
        ("gpt2", "gpt2"),
        ("gemma-3-4b", "gemma3_vision"),  # on images: each data rank reads its own
        ("qwen3-vl-8b", "qwen3_vl"),
    ],
)
def test_other_families_are_verified(model, plan):
    settings = [] if plan == "gpt2" else ["tp=2"]
    found, sink = proved(model, plan, settings=settings)
    assert (found.verdict, [d for d in sink if d.severity != "info"]) == ("verified", [])


def test_a_tower_that_is_wrong_is_refuted_at_its_line(tmp_path):
    plan = plan_of(
        tmp_path,
        """plan partial for gemma3

mesh {
    dp_shard = auto
    tp = 2
}

tensor on tp {
    model.vision_tower.encoder.layers.*.mlp {
        fc1 : colwise
        fc2 : rowwise(-> partial)
    }
}

fsdp on dp_shard {
    root : unit
}
""",
    )
    found, sink = proved("gemma-3-4b", plan)
    assert found.verdict == "refuted"
    first = found.certificate["first"]
    assert first["what"] == "output"
    assert first["name"] == "model.vision_tower.encoder.layers.0.mlp.fc2"
    assert first["places"] == [f"{plan}:{line}" for line in (11, 16)]
    assert [d.code for d in sink] == ["PL520"]


def test_a_norm_that_no_rule_names_is_refuted(tmp_path, capsys):
    plan = plan_of(tmp_path, f'plan dropped for qwen3\n\nextend "{STATED / "llama.plan"}"\n')
    words = ["qwen3-8b", str(plan), "--set", "tp=2", "--world-size", "4"]
    assert main(["verify", *words]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "error[PL520]" in told and "Refuted on 4 processes" in told
    assert "fact: no tensor rule covers model.layers.1.self_attn.k_norm" in told
    found, sink = proved("qwen3-8b", plan, settings=["tp=2"])
    assert found.certificate["errors"]["logits"] < 1e-4
    assert found.certificate["errors"]["gradients"] > 0.1
    first = found.certificate["first"]
    assert first["what"] == "gradient"
    assert first["name"] == "model.layers.1.self_attn.k_norm.weight"
    assert [d.code for d in sink] == ["PL520"]
    # check will not pass it, though it were to find nothing by itself
    assert main(["check", *words, "--format", "concise"]) == 1
    assert "PL520" in capsys.readouterr().out


def test_the_first_module_that_differs_is_named_with_its_line(tmp_path):
    plan = plan_of(
        tmp_path,
        """plan partial for llama

mesh {
    dp_shard = auto
    tp = 2
}

tensor on tp {
    model.layers.*.mlp.{gate,up}_proj : colwise
    model.layers.*.mlp.down_proj : rowwise(-> partial)
}

fsdp on dp_shard {
    root : unit
}
""",
    )
    found, sink = proved("llama-3.1-8b", plan)
    assert found.verdict == "refuted"
    first = found.certificate["first"]
    assert (first["what"], first["name"]) == ("output", "model.layers.0.mlp.down_proj")
    assert first["places"] == [f"{plan}:{line}" for line in (10, 14)]
    (finding,) = sink
    assert finding.code == "PL520" and finding.labels
    facts = load("llama-3.1-8b", Sink())
    known = recall(planc.lower("llama-3.1-8b", plan, world_size=4), facts)
    assert known.level == "refuted"
    assert known.text == f"{finding.labels[0].span.place}: {finding.message} (PL520)"
    again = planc.check("llama-3.1-8b", plan, world_size=4, level="structure")
    [again] = [d for d in again if d.code == "PL520"]
    assert again.facts == tuple(f"decided at {place}" for place in first["places"])


@pytest.mark.parametrize(("logits", "verdict"), [(3e-7, "verified"), slow(1e-30, "refuted")])
def test_what_is_nearly_right_is_compared_in_float64(monkeypatch, logits, verdict):
    """llama's logits are 1e-6 off in float32, and 1e-15 in float64: with another limit that is a
    fault of float32 alone, and with a limit below both it is one of the plan.
    """
    monkeypatch.setattr(runtime, "LIMITS", {**runtime.LIMITS, "logits": logits})
    found, sink = proved("llama-3.1-8b", "llama", settings=["tp=2"])
    assert found.verdict == verdict
    text = "float32: the model amplifies its rounding; compared in float64"
    assert (text in found.certificate["left_out"]) == (verdict == "verified")
    assert (found.certificate["errors"]["logits"] > 1e-7) == (verdict == "refuted")
    assert [d.code for d in sink if d.severity == "error"] == ["PL520"] * (verdict == "refuted")


def test_a_plan_that_crashes_is_refuted_with_the_error_of_the_rank(tmp_path):
    plan = STATED / "gemma3.plan"
    found, sink = proved("gemma-3-1b", plan, settings=["tp=2"])  # one kv head, split
    assert found.verdict == "refuted"
    (finding,) = sink
    assert finding.code == "PL521"
    assert "in the parallel model: RuntimeError: shape" in finding.message
    # the rules of the attention that fails, whose projections they split
    lines = {label.span.text.split(" ")[0] for label in finding.labels}
    assert any(line.startswith("self_attn") for line in lines), lines
    assert any("modeling_gemma3.py" in fact for fact in finding.facts)
    assert found.certificate["checks"] == ["PL201"]


def test_sizes_that_only_the_real_model_gets_wrong_are_not_verified(tmp_path):
    """Rows of 124 * 2 bytes, which grouped matrix products do not take."""
    values = json.loads((PLANS / "models" / "mixtral-8x7b.json").read_text()) | {
        "intermediate_size": 496
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = str(tmp_path / "config.json")
    found, sink = proved(model, "mixtral", world_size=32, settings=["tp=4"])
    assert found.verdict == "unknown"
    assert [d.code for d in sink] == ["PL523"]
    assert "PL226" in found.certificate["reason"]


def test_fewer_key_value_heads_than_ranks_are_as_few_in_the_small_model():
    found, sink = proved("llama-3.1-8b", "llama", world_size=32, settings=["tp=16"])
    assert found.verdict == "refuted"
    assert [d.code for d in sink] == ["PL521"]
    assert found.certificate["checks"] == ["PL201"]


def test_axes_that_the_processes_do_not_reach_are_told_and_every_line_is_reached(tmp_path):
    """The condition is true of the real model only, and the proof runs what it decides."""
    plan = plan_of(
        tmp_path,
        """plan deep for llama

extend "llama.plan"

override option recompute = false

when config.num_hidden_layers > 8 {
    checkpoint {
        model.layers[0] : full
    }
}
""",
    )
    found, _ = proved("llama-3.1-8b", plan, world_size=64, settings=["tp=2", "dp_replicate=2"])
    assert found.verdict == "verified"
    assert found.certificate["not_reached"] == ["dp_replicate = 2"]
    assert store.summary(found.certificate).endswith("not reached: dp_replicate = 2")
    assert found.certificate["small"]["config"]["num_hidden_layers"] == 3  # first, others, last


OWN = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(12, 64), nn.Linear(64, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, signal, scale):
        x = self.embed(signal)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * scale

    def planc_inputs(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        signal = torch.randn(rows, 8, 12, generator=generator)
        return {"signal": signal, "scale": torch.ones(rows, 1, 1)}

    def planc_loss(self, output, inputs):
        return ((output - inputs["signal"]) ** 2).mean()
"""


BROKEN = """plan own for Filter

mesh {
    dp_shard = auto
    tp = 2
}

tensor on tp {
    blocks.*.up : colwise
    blocks.*.down : rowwise(-> partial)
}

fsdp on dp_shard {
    root : unit
}
"""


def test_a_model_that_says_what_it_takes_is_drafted_and_verified(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_filter.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    model, plan = "own_filter:Filter", str(tmp_path / "own.plan")
    assert main(["init", model, "--allow-code", "-o", plan]) == 0
    assert "up   : colwise" in Path(plan).read_text()
    capsys.readouterr()
    words = ["--allow-code", "--world-size", "4", "--set", "tp=2"]
    assert main(["verify", model, plan, *words]) == 0
    assert "Verified on 4 processes" in capsys.readouterr().out
    Path(plan).write_text(BROKEN)
    assert main(["verify", model, plan, *words]) == 1
    assert "Refuted" in capsys.readouterr().out


def test_what_is_no_transformers_model_is_unknown(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Linear(4, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    text = "plan own for Sequential\nmesh { dp_shard = auto }\nfsdp on dp_shard { root : unit }\n"
    found, sink = proved("own_model:build", plan_of(tmp_path, text), allow_code=True)
    assert found.verdict == "unknown"
    assert [d.code for d in sink] == ["PL523"]


def test_a_plan_that_does_not_compile_is_told_as_check_does(tmp_path, capsys):
    plan = plan_of(tmp_path, "plan bad for llama\n\nmesh { tp = 0 }\n")
    assert main(["verify", "llama-3.1-8b", str(plan), "--format", "json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["certificate"] is None and found["verdict"] == "unknown"
    assert [d["code"] for d in found["diagnostics"]] == ["PL300"]


# How it ends -------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_ends_the_run(command, tmp_path):
    process = command()
    fork_server, ranks = started(process, 4)
    os.kill(ranks[2], signal.SIGKILL)
    told, _ = process.communicate(timeout=150)
    assert process.returncode == 2, told
    assert "error[PL521]: rank 2 failed: ended by SIGKILL" in told
    assert gone(fork_server)
    assert not list(tmp_path.glob("planc-verify-*"))
    assert not list((tmp_path / "cache").glob("verify-*"))  # it says nothing of the plan


def test_a_rank_that_hangs_ends_with_the_time_limit(command):
    process = command("--timeout", "12")
    fork_server, ranks = started(process, 4)
    os.kill(ranks[1], signal.SIGSTOP)
    told, _ = process.communicate(timeout=150)
    assert process.returncode == 2, told
    assert "error[PL522]: no answer from " in told
    assert re.search(r"rank 0 waits in \S+ \(\w+\.py:\d+\)", told), told
    assert gone(fork_server)


def test_where_a_rank_waits_is_read_off_its_stack(tmp_path):
    """What faulthandler wrote, the main thread last; a rank without a stack says nothing."""
    code = (
        "import faulthandler, sys, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def inner(): faulthandler.dump_traceback(open(sys.argv[1], 'w'))\n"
        "def outer(): inner()\n"
        "outer()"
    )
    script = tmp_path / "rank.py"
    script.write_text(code)
    subprocess.run([sys.executable, str(script), str(tmp_path / "1.stack")], check=True)
    assert list(_waiting(tmp_path, [0, 1])) == [
        "rank 1 waits in inner (rank.py:3), called by outer (rank.py:4)"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(command, tmp_path, number):
    process = command("--certificate", "half.json")
    fork_server, _ = started(process, 4)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert gone(fork_server)
    assert not (tmp_path / "half.json").exists()


def test_no_process_is_left_after_a_proof():
    before = set(processes())
    with runtime.fork_server() as made:
        session = made._process.pid
        assert processes(session)
    assert gone(session)
    assert not [p for p in set(processes()) - before if processes().get(p, (0, 0))[1] == session]


# The certificate ---------------------------------------------------------------------------------


def test_a_damaged_certificate_is_no_certificate(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    good = {
        "format_version": 1,
        "lowered": "a" * 64,
        "verdict": "verified",
        "processes": 4,
        "errors": {"logits": 3e-7, "gradients": 9.2e-7},
        "not_reached": [],
    }
    key = store.key_of("a" * 64, {"model_type": "llama"})
    store.keep(good, key)
    path = tmp_path / f"verify-{key}.json"
    assert store.stored_certificate("a" * 64, {"model_type": "llama"}) == good
    assert store.summary(good) == "Verified on 4 processes: logits 3e-7, gradients 9e-7"
    assert store.stored_certificate("a" * 64, {"model_type": "llama", "hidden_size": 8}) is None
    for text in (
        "",
        "{",
        "[]",
        "null",
        '{"format_version": 1}',
        path.read_text().replace("aa", "b"),
    ):
        path.write_text(text)
        assert store.stored_certificate("a" * 64, {"model_type": "llama"}) is None


def test_the_certificate_of_other_versions_is_void(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    key = store.key_of("a" * 64, {})
    monkeypatch.setattr("planc.model.cache.version", lambda name: "9.9")
    assert store.key_of("a" * 64, {}) != key


def test_the_certificate_of_another_peft_is_void_where_the_plan_uses_it(monkeypatch):
    key, plain = store.key_of("a" * 64, {}, {"peft"}), store.key_of("a" * 64, {})
    real = cache.version
    monkeypatch.setattr(cache, "version", lambda name: "9.9" if name == "peft" else real(name))
    assert store.key_of("a" * 64, {}, {"peft"}) != key
    assert store.key_of("a" * 64, {}) == plain


SHARDED = "plan t for llama\nmesh {\n dp_shard = auto\n}\nfsdp on dp_shard {\n root : unit\n}\n"
LORA = "adapters {\n model.layers.*.self_attn.q_proj : lora(rank = 8, alpha = 16)\n}\n"


@pytest.mark.parametrize("text", [SHARDED, SHARDED + LORA], ids=["plain", "lora"])
def test_a_verdict_is_of_the_peft_that_its_plan_uses(monkeypatch, text):
    plan, model = lowered(text), facts()
    key = verdict_store._key(plan, model, "layout flow")
    real = cache.version
    monkeypatch.setattr(cache, "version", lambda name: "9.9" if name == "peft" else real(name))
    assert (verdict_store._key(plan, model, "layout flow") == key) == (text == SHARDED)


def test_the_certificate_of_other_sources_of_planc_is_void(monkeypatch):
    key = store.key_of("a" * 64, {})
    assert store.key_of("a" * 64, {}) == key
    monkeypatch.setattr(store, "source_digest", lambda: "of other sources")
    assert store.key_of("a" * 64, {}) != key


def test_reading_a_certificate_imports_no_torch():
    code = "import sys, planc.simulate.certificate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_cuda_is_taken_where_there_is_a_device_for_every_rank(monkeypatch):
    from planc.simulate import numerics

    monkeypatch.setattr(numerics.torch.cuda, "device_count", lambda: 4)
    assert (numerics.device_for(4), numerics.device_for(8)) == ("cuda", "cpu")


def test_ranks_on_cuda_are_processes_of_their_own(tmp_path, monkeypatch):
    """An import of theirs may start CUDA, which does not survive a fork; torchao's does."""
    script = tmp_path / "server.py"
    script.write_text(
        "import sys\n"
        "from planc.simulate import fork_server, numerics\n"
        "numerics.device_for = lambda ranks: 'cuda'  # in this process alone\n"
        "fork_server._fork = None\n"
        "sys.exit(fork_server.main())\n"
    )
    plain = subprocess.Popen
    monkeypatch.setattr(
        runtime.subprocess,
        "Popen",
        lambda words, **options: plain([*words[:-2], str(script)], **options),
    )
    found, sink = proved("llama-3.1-8b", "llama", settings=["tp=2"], world_size=2)
    assert found.verdict == "verified", sink.diagnostics


# Mixed precision ---------------------------------------------------------------------------------


def test_a_plan_in_its_own_precision(capsys):
    command = ["verify", "llama-3.2-1b", "llama", "--set", "tp=2", "--precision"]
    assert main([*command, "--timeout", "600", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["certificate"]
    jsonschema.validate(found, SCHEMA)
    assert (
        found["limits"].keys() == found["errors"].keys() == {"logits", "loss", "gradients", "norm"}
    )
    assert 1e-3 < found["errors"]["gradients"] < found["limits"]["gradients"] < 0.25
    assert store.stored_certificate(found["lowered"], {}) is None


def test_a_plan_without_mixed_precision_has_none_to_verify(capsys):
    command = ["verify", "llama-3.2-1b", "llama", "--set", "tp=2", "--precision"]
    assert main([*command, "--set", "param_dtype=fp32"]) == 2
    assert "PL523" in (text := capsys.readouterr().out) and "no mixed precision" in text
