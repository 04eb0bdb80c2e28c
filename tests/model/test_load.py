"""MODEL as a user gives it: what is read, what is refused and how, and the cache."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from modelfolder import CONFIG, found, written
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from planc.diagnostics.diagnostic import Sink
from planc.files.resources import PLANS
from planc.model.config import config_of
from planc.model.facts import Facts
from planc.model.load import load
from planc.model.sources import huggingface, isolation
from planc.runtime.weights import saving

pytestmark = pytest.mark.usefixtures("home")


def refused(model, **keywords):
    facts, said = found(model, **keywords)
    assert facts is None
    return said


# What MODEL may be -----------------------------------------------------------------------------


def test_a_folder_a_file_and_a_shipped_name(home):
    folder = written(home / "model")
    by_folder, _ = found(folder)
    by_file, _ = found(folder / "config.json")
    assert by_folder.name == "LlamaForCausalLM"
    assert by_folder.config_name == f"{folder}/config.json" == by_file.config_name
    assert by_folder == by_file
    assert found("gpt2")[0].family == "gpt2"


@pytest.mark.parametrize("how", ["folders", "library"])
def test_a_hub_name_in_the_local_cache(home, monkeypatch, how):
    from huggingface_hub import constants

    hub = home / "hub"
    snapshot = written(hub / "models--some--Model" / "snapshots" / "0123abc")
    (hub / "models--some--Model" / "refs").mkdir()
    (hub / "models--some--Model" / "refs" / "main").write_text("0123abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub if how == "folders" else home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub if how == "library" else home))
    facts, said = found("some/Model")
    assert (facts.config_name, said) == ("some/Model/config.json", [])
    assert refused("some/Other") == ["PL600 there is no model 'some/Other'"]
    (snapshot / "config.json").unlink()
    assert refused("some/Model") == ["PL600 there is no model 'some/Model'"]


@pytest.mark.parametrize(
    "name", ["", "nothing", "a/b/c/d", "x" * 5000, "a\0b", "../..x", ":f", "~"]
)
def test_no_such_model(name):
    assert refused(name) == [f"PL600 there is no model {name!r}"]


def test_the_nearest_name_is_offered():
    sink = Sink()
    load("lama-3.1-8b", sink)
    (said,) = sink
    assert said.help is not None
    assert said.help.startswith("did you mean `llama-3.1-8b`")


# What can't be read ----------------------------------------------------------------------------


def test_a_folder_without_a_configuration(home):
    (home / "empty").mkdir()
    assert refused(home / "empty") == [
        f"PL601 cannot read {home}/empty/config.json: no such file or directory"
    ]


def test_a_configuration_that_is_a_folder(home):
    (home / "model" / "config.json").mkdir(parents=True)
    said = refused(home / "model")
    assert said == [f"PL601 cannot read {home}/model/config.json: it is not a regular file"]


def test_a_pipe_is_not_waited_for(home):
    os.mkfifo(home / "pipe.json")
    (said,) = refused(home / "pipe.json")
    assert said.startswith("PL601 ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("closed", ["model", "model/config.json"])
def test_no_permission(home, closed):
    written(home / "model")
    (home / closed).chmod(0)
    try:
        (said,) = refused(home / "model")
        assert said.startswith("PL601 ")
        assert said.endswith("permission denied")
    finally:
        (home / closed).chmod(0o755)


@pytest.mark.parametrize("step", ["stat", "open"])
def test_no_permission_whoever_runs_it(home, monkeypatch, step):
    """As the system would say it, so that root's test run sees it too."""
    folder = written(home / "model")
    real = getattr(Path, step)

    def denied(path, *arguments, **keywords):
        if path.is_relative_to(folder):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(Path, step, denied)
    (said,) = refused(folder)
    assert said.startswith("PL601 ")
    assert said.endswith("permission denied")


NOT_JSON = {
    "empty": b"",
    "cut off": b'{"model_type": "lla',
    "trailing comma": b'{"model_type": "llama",}',
    "latin 1": '{"model_type": "llamà"}'.encode("latin-1"),
    "utf 16": '{"model_type": "llama"}'.encode("utf-16"),
    "binary": bytes(range(256)),
    "list": b"[1, 2]",
    "text": b'"llama"',
    "null": b"null",
    "deep": b"[" * 200_000,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "long number": b'{"hidden_size": ' + b"9" * 10_000 + b"}",
    "large": b'{"model_type": "' + b"x" * 6_000_000 + b'"}',
}


@pytest.mark.parametrize("data", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_not_a_json_object(home, data):
    (home / "config.json").write_bytes(data)
    (said,) = refused(home)
    assert said.startswith(f"PL602 {home}/config.json ")


@pytest.mark.parametrize("depth", [50, 300, 480, 900, 980])
def test_a_nested_field_is_read_or_refused(home, depth):
    nest = "[" * depth + "]" * depth
    text = json.dumps(CONFIG)[:-1] + f', "extra": {nest}}}'
    (home / "config.json").write_text(text)
    facts, said = found(home)
    assert facts is not None or said[0][:5] in ("PL602", "PL606")


def test_a_byte_order_mark_is_no_error(home):
    (home / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(CONFIG).encode())
    assert found(home)[1] == []


# Fields ----------------------------------------------------------------------------------------

SIZE = "an integer from 1 to 100,000,000"
LAYERS = "an integer from 1 to 5,000"
WRONG = {
    "text": ({"num_attention_heads": "32"}, ["num_attention_heads", '"32"', "a positive integer"]),
    "true": ({"num_attention_heads": True}, ["num_attention_heads", "true", "a positive integer"]),
    "negative": ({"hidden_size": -64}, ["hidden_size", "-64", SIZE]),
    "zero": ({"num_hidden_layers": 0}, ["num_hidden_layers", "0", LAYERS]),
    "too many layers": ({"num_hidden_layers": 100_000}, ["100000", LAYERS]),
    "too many labels": ({"num_labels": 10_000_000}, ["10000000", "from 0 to 100,000"]),
    "null": ({"vocab_size": None}, ["vocab_size", "null", "an integer"]),
    "fraction": ({"hidden_size": 64.5}, ["hidden_size", "64.5", "an integer"]),
    "whole fraction": ({"hidden_size": 64.0}, ["hidden_size", "64.0", "an integer"]),
    "huge": ({"vocab_size": 10**12}, ["vocab_size", "1000000000000", SIZE]),
    "not a number": ({"hidden_size": float("nan")}, ["hidden_size", "NaN", "an integer"]),
    "perhaps": ({"num_key_value_heads": "8"}, ["num_key_value_heads", '"8"', "or null"]),
    "dtype": ({"dtype": 16}, ["dtype", "16", "a text or null"]),
    "family": ({"model_type": 7}, ["model_type", "7", "a text"]),
    "class": ({"architectures": "LlamaForCausalLM"}, ["architectures", "a list or null"]),
    "nested": ({"text_config": {"hidden_size": "64"}}, ["`text_config.hidden_size` is", '"64"']),
    "in a list": ({"num_attention_heads": [4, "4"]}, ["`num_attention_heads.1` is", '"4"']),
    "blocks": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
        ["`quantization_config.weight_block_size` is 128", "a list of 2 or null"],
    ),
    "three of a block": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8, 8]}},
        ["`quantization_config.weight_block_size` is [8, 8, 8]", "a list of 2 or null"],
    ),
    "missing family": ({"model_type": ...}, ["lacks `model_type`"]),
    "missing size": ({"hidden_size": ...}, ["lacks `hidden_size`"]),
    "missing heads": ({"num_attention_heads": ...}, ["lacks `num_attention_heads`"]),
}


@pytest.mark.parametrize(("fields", "words"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_field_is_named(home, fields, words):
    (said,) = refused(written(home / "model", **fields))
    assert said.startswith("PL603 ")
    assert f"{home}/model/config.json" in said
    for word in words:
        assert word in said


def test_every_wrong_field_is_a_finding(home):
    folder = written(home / "model", hidden_size="64", vocab_size=None, num_hidden_layers=True)
    names = [said.split("`")[1] for said in refused(folder)]
    assert names == ["hidden_size", "num_hidden_layers", "vocab_size"]


def test_a_missing_field_tells_the_default_and_its_own_name(home):
    values = json.loads((PLANS / "models" / "gpt2.json").read_text())
    del values["n_head"]
    path = home / "config.json"
    path.write_text(json.dumps(values))
    sink = Sink()
    assert load(str(path), sink) is None
    (said,) = sink
    assert said.message == f"{path} lacks `n_head`"
    assert said.facts == ("n_head = 12  (default of gpt2)",)


def test_null_heads_are_the_family_s_business(home):
    facts, said = found(written(home / "model", num_key_value_heads=None))
    assert (facts.config["num_key_value_heads"], said) == (4, [])


# Families and classes --------------------------------------------------------------------------


def test_an_unknown_family_offers_the_nearest(home):
    sink = Sink()
    assert load(str(written(home / "model", model_type="lamma")), sink) is None
    (said,) = sink
    assert said.code == "PL604"
    assert "'lamma'" in said.message
    assert said.help is not None
    assert "llama" in said.help
    assert said.facts[0].startswith("transformers ")


def test_a_family_without_a_language_model(home):
    fields = {"model_type": "vit", "hidden_size": 64, "architectures": None}
    (said,) = refused(written(home / "model", **fields))
    assert said.startswith("PL605 ")


def test_an_import_that_fails_is_the_reason(home, monkeypatch):
    """As with a torchvision of another torch: transformers then has none of its models."""

    def broken(*_):
        raise ImportError("no module") from RuntimeError("operator torchvision::nms is missing")

    monkeypatch.setattr(huggingface, "_inner_class", broken)
    fields = {"model_type": "vit", "hidden_size": 64, "architectures": ["ViTForNothing"]}
    (said,) = refused(written(home / "model", **fields))
    assert said.startswith("PL606 ") and "ViTForNothing cannot be imported: RuntimeError" in said
    assert "torchvision::nms is missing" in said


def test_a_class_of_another_family_is_passed_over(home):
    facts, _ = found(written(home / "model", architectures=["Qwen3ForCausalLM", "Trainer", "json"]))
    assert facts.name == "LlamaForCausalLM"


def test_a_class_that_the_file_names(home):
    folder = written(home / "model", architectures=["LlamaForSequenceClassification"])
    assert found(folder)[0].name == "LlamaForSequenceClassification"


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]}
CONTRADICTIONS = {
    "heads": {"num_attention_heads": 5},
    "activation": {"hidden_act": "no_such_function"},
    "dtype": {"dtype": "float17"},
    "null where another family takes it": {"intermediate_size": None},
    "layers": {"model_type": "qwen3", "architectures": None, "layer_types": ["full_attention"]},
}


@pytest.mark.parametrize("fields", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_what_transformers_refuses_is_a_finding(home, fields):
    (said,) = refused(written(home / "model", **fields))
    assert said.startswith("PL606 transformers cannot build a model from ")


def test_a_model_of_too_many_modules_is_not_built(home, monkeypatch):
    """Whatever field asks for them: a bound per field would need each family's names."""
    monkeypatch.setattr(isolation, "MAX_PARTS", 30)
    (said,) = refused(written(home / "model", num_hidden_layers=500))
    assert said.startswith("PL606 ") and "more than 30 modules and parameters" in said
    from torch.nn.modules import module

    assert not module._global_module_registration_hooks
    assert not module._global_parameter_registration_hooks


def test_infinite_floats_as_transformers_writes_them(home):
    written(home / "model", architectures=None, model_type="bamba", **MAMBA)
    file = home / "model" / "config.json"
    values = json.loads(file.read_text())
    values["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    values["extra"] = [{"__float__": "-Infinity"}, {"__float__": "1"}, {"__float__": []}]
    file.write_text(json.dumps(values))
    facts, said = found(home / "model")
    assert said == []
    assert list(facts.config["time_step_limit"]) == [0.0, float("inf")]
    assert facts.config["extra"] == [-float("inf"), {"__float__": "1"}, {"__float__": []}]
    assert found(home / "model")[0].config == facts.config, "the cache has the same"


@pytest.mark.parametrize(
    "name", ["bamba-9b", "falcon-h1-0.5b", "nemotron-h-8b", "mamba-codestral-7b"]
)
def test_the_configuration_of_an_export_is_read_back(home, name):
    """What `run.export` writes beside the weights, with the infinite floats of these families."""
    values = json.loads((PLANS / "models" / f"{name}.json").read_text())
    values["time_step_limit"] = [0.0, float("inf")]
    values["num_hidden_layers"] = 4
    for field in ("layers_block_type", "hybrid_override_pattern", "layer_types"):
        values.pop(field, None)
    if name == "bamba-9b":
        values["attn_layer_indices"] = [1]
    if name == "nemotron-h-8b":
        values["hybrid_override_pattern"] = "M-*M"
    folder = home / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    first, said = found(folder)
    assert said == []
    config = config_of(json.loads((folder / "config.json").read_text()), "config.json")
    cls, part = huggingface.prepare(config, Sink())
    model = huggingface._on_meta(lambda: cls._from_config(part))
    (home / "export").mkdir()
    lowered = SimpleNamespace(find_ops=lambda _kind: [], model=first.name)
    saving._describe(home / "export", model, lowered, None, [*model.state_dict()])
    written = (home / "export" / "config.json").read_text()
    assert '"__float__": "Infinity"' in written
    again, said = found(home / "export")
    assert said == [] and again.root == first.root
    assert list(again.config["time_step_limit"]) == [0.0, float("inf")]


KERNELS = {
    "public": {"attn_implementation": "org/kernel"},
    "private": {"_attn_implementation": "org/kernel"},
    "internal": {"_attn_implementation_internal": "org/kernel"},
    "by part": {"attn_implementation": {"": "org/kernel", "text_config": "org/kernel"}},
    "flash": {"attn_implementation": "flash_attention_2"},
    "experts": {"experts_implementation": "org/kernel", "_experts_implementation": "org/kernel"},
    "layer": {"per_layer_config": {"0": {"attn_implementation": "org/kernel"}}},
}


@pytest.fixture
def hub(monkeypatch):
    """What would be loaded from the hub, as if the package `kernels` were installed."""
    from transformers import modeling_flash_attention_utils, modeling_utils
    from transformers.integrations import hub_kernels

    asked = []

    def load_kernel(name, **_):
        asked.append(name)
        raise RuntimeError(f"{name} was loaded")

    monkeypatch.setattr(hub_kernels, "get_kernel_hub", load_kernel, raising=False)
    monkeypatch.setattr(hub_kernels, "_kernels_enabled", True)
    for module in (hub_kernels, modeling_utils, modeling_flash_attention_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda *_: True, raising=False)
    return asked


@pytest.mark.parametrize("fields", KERNELS.values(), ids=KERNELS.keys())
def test_a_kernel_of_the_hub_is_never_loaded(home, hub, fields):
    facts, _ = found(written(home / "model", **fields))
    assert hub == []
    if "per_layer_config" not in fields:
        assert facts.name == "LlamaForCausalLM"
    plain, _ = found(written(home / "plain"))
    assert facts is None or facts.root == plain.root


def test_the_loader_of_kernels_is_out_of_reach(home, hub, monkeypatch):
    """Even where a field gets through: the loader itself is replaced, and put back."""
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(huggingface, "without_kernels", lambda values: values)
    (said,) = refused(written(home / "model", **KERNELS["public"]))
    assert hub == [] and "planc loads no kernels from the hub" in said
    with pytest.raises(RuntimeError, match="was loaded"):
        hub_kernels.get_kernel_hub("org/kernel")


def test_a_backbone_of_the_hub_is_not_fetched(home, monkeypatch):
    """The name of a backbone is a repository, whose configuration transformers would ask for."""
    from huggingface_hub import constants

    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **_: asked.append(a) or [])
    fields = {"model_type": "dpt", "architectures": ["DPTForDepthEstimation"]}
    folder = written(home / "model", **fields, backbone="org/backbone", use_timm_backbone=False)
    assert refused(folder)[0].startswith("PL606 ")
    assert asked == []
    assert constants.HF_HUB_OFFLINE is False


def test_the_verbosity_of_transformers_is_left_as_it_was(home):
    from transformers.utils import logging

    before = logging.get_verbosity()
    try:
        logging.set_verbosity_info()
        assert found(written(home / "model"), cache=False)[0] is not None
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)


# Code ------------------------------------------------------------------------------------------

OWN = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM

class Mine(LlamaForCausalLM):
    config_class = LlamaConfig
"""


def with_code(home, reference="modeling_mine.Mine", **fields):
    folder = written(home / "model", auto_map={"AutoModelForCausalLM": reference}, **fields)
    (folder / "modeling_mine.py").write_text(OWN.format(mark=str(home / "ran")))
    return folder


def test_code_of_a_model_is_not_run(home):
    for _ in range(2):  # cold, and from the cache
        facts, said = found(with_code(home))
        assert facts.name == "LlamaForCausalLM"
        assert [s[:5] for s in said] == ["PL609"]
    assert [s[:5] for s in refused(with_code(home, model_type="mine"))] == ["PL604"]
    assert not (home / "ran").exists()


def test_code_of_a_model_runs_when_allowed(home, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(home / "modules"))
    facts, said = found(with_code(home), allow_code=True)
    assert (facts.name, said) == ("Mine", [])
    assert (home / "ran").exists()


def test_code_elsewhere_is_not_fetched(home):
    (said,) = refused(with_code(home, "some/repo--modeling_mine.Mine"), allow_code=True)
    assert said.startswith("PL609 ")


FACTORY = """
import sys
from pathlib import Path
Path("ran").touch()
from torch import nn

def build():
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})

def wrong():
    return 3

def fails():
    raise RuntimeError("no weights\\nhere")

def leaves():
    sys.exit(7)
"""


def test_a_factory(home, monkeypatch):
    (home / "my_models_of_test.py").write_text(FACTORY)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(home)])
    (said,) = refused("my_models_of_test:build")
    assert said.startswith("PL607 ")
    assert not (home / "ran").exists()
    facts, said = found("my_models_of_test:build", allow_code=True)
    assert (facts.name, facts.family, facts.count, said) == ("ModuleDict", "ModuleDict", 60, [])
    assert (home / "ran").exists()
    failures = {
        "wrong": "it returned an object of type int, not an nn.Module",
        "fails": "RuntimeError: no weights here",
        "leaves": "SystemExit: 7",
        "missing": "AttributeError",
    }
    for name, words in failures.items():
        (said,) = refused(f"my_models_of_test:{name}", allow_code=True)
        assert said.startswith(f"PL608 my_models_of_test:{name} failed: ")
        assert words in said
    (said,) = refused("no_such_module_of_test:build", allow_code=True)
    assert "ModuleNotFoundError" in said


def test_a_factory_by_its_file(home):
    for file in ("my_file_of_test.py", "./my_file_of_test.py"):
        assert found(f"{file}:build")[1] == [f"PL600 there is no model '{file}:build'"]
    sink = Sink()
    load("train/models.py:build", sink)
    assert "and not its file: `train.models:build`" in sink.diagnostics[0].help


def test_quantization_is_said_not_to_count(home):
    folder = written(home / "model", quantization_config={"quant_method": "fp8"})
    for _ in range(2):
        assert [s[:5] for s in found(folder)[1]] == ["PL610"]


def test_load_takes_no_notice_of_the_folder_s_weights(home):
    folder = written(home / "model")
    (folder / "model.safetensors").write_bytes(b"not weights")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    assert isinstance(found(folder)[0], Facts)
    assert not (home / "ran").exists()


LISTED = """
import sys
from transformers.utils import import_utils
read = []
scan = import_utils.fetch__all__
import_utils.fetch__all__ = lambda text: read.append(1) or scan(text)
if sys.argv[1] == "planc":
    from planc.model.sources.isolation import import_models
    import_models()
import transformers.models
modules = transformers.models._class_to_module
print(len(read), len(modules), hash(str(sorted(modules.items()))))
"""


def test_transformers_reads_the_files_of_its_models_once():
    """And lists the same classes as after two readings."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    found = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LISTED, way],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for way in ("planc", "transformers")
    ]
    (once, *mine), (twice, *theirs) = found
    assert mine == theirs and int(mine[0]) > 1000
    assert int(once) < 10 < int(twice)


def in_two_threads(first, second):
    """Calls both at once: the second one begins after the first and ends after it, if it can."""
    inside, ended = threading.Event(), threading.Event()

    def one():
        first(lambda: (inside.set(), ended.wait(0.2)))
        ended.set()

    thread = threading.Thread(target=one)
    thread.start()
    inside.wait()
    second(lambda: ended.wait(0.4))
    thread.join()


def test_two_threads_leave_the_hub_as_it_was(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def isolated(inside):
        with isolation.isolate():
            inside()

    in_two_threads(isolated, isolated)
    assert constants.HF_HUB_OFFLINE is False


def test_a_model_that_another_thread_builds_is_initialized():
    """Threads that play ranks build models while others read the facts of theirs."""
    made = {}

    def builds(inside):
        config = LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
        with torch.device("cpu"):
            made["model"] = LlamaForCausalLM(config)
        inside()

    in_two_threads(
        lambda inside: huggingface._on_meta(lambda: (inside(), nn.Linear(1, 1))[1]), builds
    )
    norm = made["model"].lm_head.weight.std()
    assert abs(norm - 0.02) < 0.002, "initializer_range of its configuration"


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (["Reward"], "AutoModelForSequenceClassification"),
        (["Language"], "AutoModelForCausalLM"),
        ([], "AutoModelForCausalLM"),
    ],
)
def test_a_folder_stands_for_the_model_of_its_architectures(architectures, expected):
    classes = {
        "AutoConfig": "own.Configuration",
        "AutoModel": "own.Base",
        "AutoModelForCausalLM": "own.Language",
        "AutoModelForSequenceClassification": "own.Reward",
    }
    values = {**CONFIG, "architectures": architectures, "auto_map": classes}
    assert config_of(values, "a folder").own_model == expected
