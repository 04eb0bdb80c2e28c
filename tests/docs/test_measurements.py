"""Numbers of measurements are in docs/generated/, on pages that their targets write."""

import importlib.util
import re
import time

import bench_page
import gpu_page
import pytest
import records
import tables
from folders import ROOT
from test_links import PAGES

CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.M | re.S)
MEASURED = re.compile(r"\d[\d.,]* ?(?:%|percent\b|s\b|ms\b|seconds?\b|minutes?\b|times as \w+)")
SETTINGS = {"1 %", "95 %", "300 seconds"}
"""The share of PL204, that of `planc suggest`, and the example of `watchdog`."""
TRUST = ROOT / "docs" / "estimate-trust.md"


def measured_numbers(text):
    """The times and shares in the sentences of a page."""
    return set(MEASURED.findall(CODE.sub("`", text)))


def test_sentences_link_to_measured_numbers():
    read = [page for page in PAGES if not {"diagnostics", "generated"} & {*page.parts}]
    read.remove(TRUST)
    found = {page.name: measured_numbers(page.read_text()) - SETTINGS for page in read}
    assert not {page: numbers for page, numbers in found.items() if numbers}


def test_the_errors_of_published_runs_are_those_of_the_tables():
    """The page on trust repeats a table of `make estimate`, to judge it."""
    rows = [
        line for line in TRUST.read_text().splitlines() if line.startswith(("| h100,", "| a100,"))
    ]
    generated = (ROOT / "docs" / "generated" / "estimate-tables.md").read_text().splitlines()
    assert len(rows) == 5 and {*rows} <= {*generated}


def test_a_measured_number_is_found():
    text = (
        "It takes 1.5 s, 12 % less, 2 times as fast.\n\n   ```\n   3 s\n   ```\n\n`4 ms` of 5 ranks"
    )
    assert measured_numbers(text) == {"1.5 s", "12 %", "2 times as fast"}


@pytest.mark.parametrize("name", ["bench", "gpu", "mutants"])
def test_a_page_shows_its_record(name):
    page = {"bench": bench_page.page, "gpu": gpu_page.page, "mutants": tables.page}[name]
    assert (records.GENERATED / f"{name}.md").read_text() == page(records.read_record(name))


@pytest.fixture
def generated(tmp_path, monkeypatch):
    """An empty folder of records and pages."""
    monkeypatch.setattr(records, "GENERATED", tmp_path)
    return tmp_path


def test_make_bench_replaces_the_rows_of_a_part(generated):
    bench_page.add_rows("muon", [("step, against torch", 0.5, 1.0, 1.0)])
    bench_page.add_rows("loading", [("MiB", 1234.0, 1000.0, 2.0)])
    bench_page.add_rows("muon", [("step, against torch", 0.04, 1.0, 1.0)])
    text = (generated / "bench.md").read_text()
    assert "| step, against torch | 0.04 | 1 | 0.040 | 1.0 |" in text
    assert "| MiB | 1,234 | 1,000 | 1.234 | 2.0 |" in text
    assert "0.500" not in text


def test_make_gpu_keeps_results_of_other_devices(generated):
    command = "planc verify llama-3.1-8b llama --world-size 2 --set tp=2"
    text = "norm 8e-8\nVerified on 2 processes: logits 3e-7, gradients 0. 2.4 s\n"
    verified = gpu_page.results_of("tp", "verify", text, generated, command)
    assert verified == {"tp": {"command": command, "logits": "3e-7", "gradients": "0"}}
    gpu_page.add_results("H100, torch 2.11", {"tp": {"result": "failed, exit code 1"}})
    gpu_page.add_results("H200, torch 2.13", verified)
    page = (generated / "gpu.md").read_text()
    assert "## H100, torch 2.11\n\n| part | command | result |" in page
    assert "| tp |  | failed, exit code 1 |" in page
    assert f"| tp | `{command}` | logits 3e-7, gradients 0 |" in page


def test_a_measured_rank_is_the_row_of_its_command(generated):
    rows = "model,plan,world_size,batch,seq,set,micro_batches,gib,compute\n"
    rows += "l,llama,8,8,64,,1,1.5,0.25\nl,llama,8,8,64,tp=8,1,2.5,0.125\n"
    (generated / "rows.csv").write_text(rows)
    command = "planc measure l llama --world-size 8 --batch 8 --seq 64 --device cuda -o rows.csv"
    plain = gpu_page.results_of("dp", "measure", "", generated, command)["dp"]
    assert (plain["GiB"], plain["seconds of compute"]) == ("1.50", "0.250")
    split = gpu_page.results_of("tp", "measure", "", generated, f"{command} --set tp=8")["tp"]
    assert split["GiB"] == "2.50"


def test_timed_steps_are_a_row_each(generated):
    times = '{"ms of a step": 411.2, "ms of the optimizer": 25.4, "losses": [1]}'
    text = f'warning\n{{"bf16": {times}}}\n{{"int8": {{"error": "no"}}}}\n'
    found = gpu_page.results_of("products", "products", text, generated, "")
    numbers = {"ms of a step": "411", "ms of the optimizer": "25"}
    assert found == {"products, bf16": numbers}


def test_make_mutants_replaces_the_sample_of_the_same_families(generated):
    counts = [["style", "wrong", "refuted", 3], ["unchanged", "right", "passed", 1]]
    for seed, count in ((0, 3), (1, 4), (0, 5)):
        counts[0][3] = count
        tables.add_sample([{"family": "llama", "counts": counts}], 56, seed)
    rows = re.findall(r"^\| llama \| 56 \|.*$", (generated / "mutants.md").read_text(), re.M)
    assert [row.split(" | ")[3:6] for row in rows] == [["4", "0", "0"], ["5", "0", "0"]]


@pytest.fixture
def gpu_run():
    """The module of `make gpu`."""
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "tests" / "gpu" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_gpu_still_runs_the_parts_of_its_record(gpu_run, tmp_path):
    """Each part of the record is one that `make gpu` still runs, or a step of one."""
    kinds = ("measure", "products", "states", "verify", "saving", "preflight", "hang")
    names = {part.name for kind in kinds for part in gpu_run.parts(kind, tmp_path)}
    recorded = {name for results in records.read_record("gpu").values() for name in results}
    assert all(name in names or name.partition(",")[0] in names for name in recorded)


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print('Verified on 2 processes: logits 0, gradients 1e-7. 1 s')", {"logits": "0"}),
        ("raise SystemExit(1)", {"result": "failed, exit code 1"}),
    ],
)
def test_make_gpu_reads_what_a_part_prints(gpu_run, tmp_path, code, result):
    part = gpu_run.Part("tp", "verify", (*gpu_run.RUN, "-c", code), 30)
    found = gpu_run.run(part, tmp_path, time.monotonic() + 30)["results"]["tp"]
    assert result.items() <= found.items()
