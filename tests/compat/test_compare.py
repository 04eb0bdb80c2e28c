"""`make compare` on two small folders of packages."""

import compare

AUTO = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict([('llama', 'LlamaForCausalLM'){}])\n"
MODEL = "class Base:\n    _keep_in_fp32_modules_strict = {}\n\n" + 100 * "f({}=1)\n"


def release(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def transformers(folder, types, families, kept, word):
    models = {
        f"transformers/models/{family}/modeling_{family}.py": MODEL.replace("{}", kept, 1).replace(
            "{}", word
        )
        for family in families
    }
    return release(
        folder, {"transformers/models/auto/modeling_auto.py": AUTO.format(types), **models}
    )


def test_changes_of_models(tmp_path):
    old = transformers(tmp_path / "old", "", ["llama", "gone"], "None", "past_key_values")
    added = ", ('dory', 'Dory')"
    new = transformers(tmp_path / "new", added, ["llama", "dory"], '["gate.weight"]', "cache")
    assert list(compare.changed_families(old, new)) == [
        "new folders of models: dory",
        "folders that are gone: gone",
        "new causal language models: dory",
        "causal language models that are gone: none",
        "argument `cache`: 0 places -> 100",
        "argument `past_key_values`: 100 places -> 0",
        'in fp32, llama: None -> ["gate.weight"]',
    ]


def test_changes_of_names(tmp_path):
    before = {"torch/a.py": "class A:\n    def f(self, x): return 1\ndef g(): pass\nV = 1\n"}
    after = {
        "torch/a.py": 'class A:\n    def f(self, y):\n        "Doc."\n        return 1\nV = 1\n'
    }
    old, new = release(tmp_path / "old", before), release(tmp_path / "new", after)
    names = ["torch.a:A.f", "torch.a:g", "torch.a:V", "torch.a:A"]
    changed = list(compare.changed_names(old, new, names, arguments=True))
    assert changed == ["other arguments: torch.a:A.f", "missing: torch.a:g"]
    changed = list(compare.changed_names(old, new, ["torch.a:A", "torch.a:V"], arguments=False))
    assert changed == ["other body: torch.a:A"]


def test_changes_of_files(tmp_path):
    name = "torch/distributed/{}.py"
    old = release(tmp_path / "old", {name.format(n): n for n in "abc"})
    new = release(tmp_path / "new", {name.format(n): n.replace("b", "x") for n in "abd"})
    assert list(compare.changed_files(old, new, "torch/distributed")) == [
        "differs: torch/distributed/b.py",
        "gone: torch/distributed/c.py",
        "new: torch/distributed/d.py",
    ]


def test_names_of_compat_are_read():
    names = set(compare.imported_names("torch"))
    assert "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup" in names
    assert len(names) > 30
