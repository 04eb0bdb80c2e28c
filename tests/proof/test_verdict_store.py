"""What a check found of a plan is found again by `planc.apply`, and nothing else is."""

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from modelfolder import BROKEN_QWEN3, QWEN3
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

import planc
from planc.diagnostics.diagnostic import Sink
from planc.model import cache
from planc.model.module_table import facts_of
from planc.ops.document import digest, dumps
from planc.runtime.known_verdict import KnownVerdict
from planc.simulate import certificate, verdict_store

SETTINGS = {"world_size": 4, "overrides": ["tp=2"]}
WITH_A_WARNING = """plan warned for qwen3

mesh {
    dp_shard = auto
    tp       = 2
}

tensor on tp {
    layouts = stated
    model.layers.* {
        self_attn.{q,k,v}_proj : colwise
        self_attn.o_proj       : rowwise
        mlp.{gate,up}_proj     : colwise
        mlp.down_proj          : rowwise
    }
}

fsdp on dp_shard {
    model.layers.* : unit
    root           : unit
}
"""


@pytest.fixture
def folder(home):
    (home / "config.json").write_text(json.dumps(QWEN3))
    (home / "warned.plan").write_text(WITH_A_WARNING)
    (home / "broken.plan").write_text(BROKEN_QWEN3)
    return home


@pytest.fixture(scope="module")
def proved_once(tmp_path_factory):
    """A cache with the verdict on the plan of qwen3."""
    home = tmp_path_factory.mktemp("proved")
    (home / "config.json").write_text(json.dumps(QWEN3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANC_CACHE_DIR", str(home / "cache"))
        planc.check(str(home), "qwen3", **SETTINGS)
    return home / "cache"


@pytest.fixture
def proved(folder, proved_once):
    """The folder, after a check of the plan of qwen3."""
    shutil.copytree(proved_once, folder / "cache", dirs_exist_ok=True)
    return folder


@pytest.fixture
def four_ranks():
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


def built(folder=".", device="meta"):
    """The model as a training script builds it."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def known(model, plan="qwen3", **settings):
    lowered = planc.lower(model, plan, **{**SETTINGS, **settings})
    return verdict_store.recall(lowered, facts_of(model, config=model.config))


def applied(caplog, plan="qwen3", **options):
    with caplog.at_level(logging.INFO, logger="planc"):
        run = planc.apply(built(), plan, overrides=["tp=2"], device_type="cpu", **options)
    return run, [(r.levelname, r.getMessage()) for r in caplog.records]


def test_a_plan_that_was_refuted_is_refused(folder, four_ranks, caplog):
    distributed.destroy_process_group()  # the simulation has one of its own
    assert "PL502" in {d.code for d in planc.check(str(folder), "broken.plan", **SETTINGS)}
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    with pytest.raises(planc.PlanError) as caught:
        applied(caplog, "broken.plan")
    assert [d.code for d in caught.value.diagnostics] == ["PL480"]
    assert "(PL502)" in str(caught.value) and "q_norm" in str(caught.value)
    assert re.search(r"another model: broken.plan:\d+: the gradient", str(caught.value))
    _, lines = applied(caplog, "broken.plan", require="nothing")
    assert any(level == "WARNING" and "(PL502)" in text for level, text in lines)


def test_a_plan_that_was_proved_is_applied(folder, caplog):
    assert known(built()).level == "unproved"
    planc.check(str(folder), "qwen3", **SETTINGS)
    found = known(built())
    assert (found.level, found.text) == ("proved", "proved")
    assert known(built(), overrides=["tp=2", "recompute=false"]).level == "unproved"
    assert known(built(), world_size=8).level == "unproved"
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        _, lines = applied(caplog, require="proved")
    finally:
        distributed.destroy_process_group()
    assert lines[-1][0] == "INFO" and lines[-1][1].endswith(": proved")


def test_a_world_size_that_was_not_proved(proved):
    """It is said with those that the same text was proved for, whatever the settings."""
    text = planc.syntax.plan_files.digest(planc.compiler.read("qwen3", Sink()))
    facts = facts_of(built(), config=built().config)
    eight = planc.lower(built(), "qwen3", world_size=8)
    said = verdict_store.recall(eight, facts, text)
    assert said.level == "unproved"
    assert said.text.startswith(
        "never proved on 8 ranks (dp_replicate 1 | dp_shard 8 | tp 1), but on"
        " 4 ranks (dp_replicate 1 | dp_shard 2 | tp 2): run `planc check`"
    )
    planc.check(str(proved), "qwen3", world_size=2)
    assert ", but on 4 ranks (" in (told := verdict_store.recall(eight, facts, text).text)
    assert "and 2 ranks (" in told
    assert "but on" not in verdict_store.recall(eight, facts, "another text").text
    alone = planc.lower(built(), "qwen3", world_size=1)
    assert "never proved on 1 rank (" in verdict_store.recall(alone, facts, text).text


def test_a_model_that_a_script_builds_from_keywords(proved):
    """Its configuration names no class, as that of a folder does."""
    keywords = {name: value for name, value in QWEN3.items() if name != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keywords))
    assert model.config.architectures is None
    assert known(model).level == "proved"


def test_apply_says_what_a_plan_was_proved_on(proved, caplog):
    distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        _, lines = applied(caplog)
    finally:
        distributed.destroy_process_group()
    level, last = lines[-1]
    assert level == "WARNING" and "never proved on 8 ranks" in last and "but on 4 ranks" in last


def test_a_lowered_file_is_found_by_the_same_digest(proved):
    (proved / "l.json").write_text(dumps(planc.lower(str(proved), "qwen3", **SETTINGS)))
    lowered = planc.lower(built(), "l.json")
    facts = facts_of(built(), config=built().config)
    assert verdict_store.recall(lowered, facts).level == "proved"


class Other(nn.Linear):
    """A layer of the user's own, in the place of torch's."""


def test_a_model_that_a_script_has_changed_is_another_one(proved):
    model = built(device="cpu")  # its data flow is that of its own code, which runs
    model.model.layers[1].mlp.down_proj = Other(96, 64, bias=False)
    assert known(model).level == "unproved"
    model = built()
    model.config.rms_norm_eps = 1e-2
    assert known(model).level == "unproved"


def entry(folder):
    """The file of the verdict."""
    facts = facts_of(built(), config=built().config)
    lowered = planc.lower(built(), "qwen3", **SETTINGS)
    key = verdict_store._key(lowered, facts, "layout flow")
    return folder / "cache" / f"{key}.json", key


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("proved", "refuted"),
        lambda text: text.split("\n")[1],
        lambda text: "\0" * 100,
        lambda text: "[" * 100_000,
    ],
)
def test_a_damaged_verdict_is_no_verdict(proved, damage):
    file, _ = entry(proved)
    assert known(built()).level == "proved"
    file.write_text(damage(file.read_text()))
    assert known(built()).level == "unproved"


@pytest.mark.parametrize(
    "data",
    [
        {"level": "verified", "text": "verified on 4 processes"},
        {"level": "certain", "text": "x"},
        {"level": ["proved"], "text": "x"},
        {"level": "proved", "text": 3},
        {"level": "proved"},
        ["proved", "proved"],
        None,
    ],
)
def test_a_verdict_of_another_form_is_no_verdict(folder, data):
    """`verified` is what a certificate alone can say."""
    _, key = entry(folder)
    cache.keep(key, data)
    assert known(built()).level == "unproved"


def test_planc_itself_is_a_part_of_the_key(proved, monkeypatch):
    assert known(built()).level == "proved"
    monkeypatch.setattr(verdict_store, "_all_sources", lambda: "mended")
    assert known(built()).level == "unproved"


def test_the_sources_are_all_of_planc(tmp_path, monkeypatch):
    package = Path(planc.__file__).parent
    for path in package.rglob("*.py"):
        target = tmp_path / path.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    monkeypatch.setattr(certificate, "PACKAGE", tmp_path)
    sums = [verdict_store._all_sources.__wrapped__()]
    for name in ("elaborate/selectors.py", "lowering/lower.py", "checks/splits.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
        sums.append(verdict_store._all_sources.__wrapped__())
    assert len(set(sums)) == 4


@pytest.mark.parametrize(
    ("flow", "processes", "level", "text"),
    [
        (None, "verified", "verified", "processes say verified"),
        ("proved", "verified", "verified", "processes say verified"),
        ("undecided", "verified", "verified", "processes say verified"),
        ("refuted", "verified", "refuted", "flow says refuted"),
        ("proved", "refuted", "refuted", "processes say refuted"),
        ("undecided", None, "undecided", "flow says undecided"),
    ],
)
def test_both_proofs_count(folder, flow, processes, level, text):
    lowered = planc.lower(built(), "qwen3", **SETTINGS)
    facts = facts_of(built(), config=built().config)
    if flow:
        verdict_store.remember(lowered, facts, KnownVerdict(level=flow, text=f"flow says {flow}"))
    if processes:
        said = KnownVerdict(level=processes, text=f"processes say {processes}")
        verdict_store.remember(lowered, facts, said, by="processes")
    found = known(built())
    assert (found.level, found.text) == (level, text)


def test_the_dtype_of_the_weights_changes_no_verdict(folder):
    """A script may train in fp32 what config.json says is stored in bf16."""
    (folder / "config.json").write_text(json.dumps({**QWEN3, "dtype": "bfloat16"}))
    planc.check(str(folder), "qwen3", **SETTINGS)
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(".")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lowered = planc.lower(model, "qwen3", **SETTINGS)
    assert digest(lowered) != digest(planc.lower(str(folder), "qwen3", **SETTINGS))
    assert known(model).level == "proved"


def test_a_read_only_cache_is_no_error(folder, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", "/proc/planc")
    planc.check(str(folder), "qwen3", **SETTINGS)
    assert known(built()).level == "unproved"


def test_an_unknown_requirement_is_an_error(folder):
    with pytest.raises(ValueError, match="require is 'nothing', 'proved' or 'verified'"):
        planc.apply(built(), "qwen3", require="sure")


# Findings ----------------------------------------------------------------------------------------


def test_a_lowered_plan_has_its_findings(folder):
    lowered = planc.lower(str(folder), "warned.plan", **SETTINGS)
    assert "PL161" in {d.code for d in lowered.findings}
    bare = replace(lowered, findings=())
    assert lowered == bare and hash(lowered) == hash(bare) and digest(lowered) == digest(bare)
    assert dumps(lowered) == dumps(bare) and "PL161" not in repr(lowered)
    assert lowered.map_ops(lambda _: ()).findings == lowered.findings


def test_apply_logs_each_warning_once(folder, four_ranks, caplog):
    _, lines = applied(caplog, "warned.plan")
    warned = [text for level, text in lines if level == "WARNING" and "[PL161]" in text]
    assert len(warned) == 1
    assert warned[0].startswith("warned.plan:11:")
    caplog.clear()
    lowered = planc.lower(built(), "warned.plan", **SETTINGS)
    facts = facts_of(built(), config=built().config)
    verdict = KnownVerdict(level="proved", text="proved")  # which overrules it
    verdict_store.remember(lowered, facts, verdict)
    _, lines = applied(caplog, "warned.plan")
    assert not [text for _, text in lines if "PL161" in text]


def test_other_ranks_log_nothing(folder, caplog):
    distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        assert applied(caplog, "warned.plan")[1] == []
    finally:
        distributed.destroy_process_group()


def test_the_dtype_of_a_module_is_known_and_that_of_a_configuration_is_not(folder):
    (folder / "config.json").write_text(json.dumps({**QWEN3, "dtype": "bfloat16"}))
    half, whole = built(), built().float()
    arguments = {**SETTINGS, "level": "structure"}
    assert "PL420" in {d.code for d in planc.check(half, "qwen3", **arguments)}
    assert "PL420" not in {d.code for d in planc.check(whole, "qwen3", **arguments)}
    assert "PL420" not in {d.code for d in planc.check(str(folder), "qwen3", **arguments)}
    assert planc.lower(half, "qwen3", **SETTINGS).stages[0].steps == ("bfloat16",)
    assert planc.lower(whole, "qwen3", **SETTINGS).stages[0].steps == ("float32",)
    for parameter in half.parameters():
        parameter.requires_grad_(False)
    half.lm_head.float().requires_grad_(True)
    assert "PL420" not in {d.code for d in planc.check(half, "qwen3", **arguments)}
