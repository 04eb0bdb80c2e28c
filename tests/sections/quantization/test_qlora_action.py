"""The action `qlora` of an adapters section is that of the section's folder."""

import json

from copied_package import copy_package, run_program

PLAN = """plan t for llama
extend "llama"
adapters {
    $blocks.self_attn.q_proj : qlora(rank = 8)
}
"""
CODE = "import json, sys; from console import call; print(json.dumps(call(*sys.argv[1:])))"


def test_without_the_folder_adapters_have_no_such_action(tmp_path):
    copy_package(tmp_path, without=["quantization"])
    (tmp_path / "small.plan").write_text(PLAN)
    words = ("check", "llama-3.1-8b", "small.plan", "--world-size", "8", "--level", "structure")
    exit_code, text, errors = json.loads(run_program(tmp_path, "-c", CODE, *words, folder=tmp_path))
    assert exit_code == 1 and "there is no adapter `qlora`" in text + errors
