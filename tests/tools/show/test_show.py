"""`planc show` and `planc diff --html`: the page's structure, and how it behaves in a browser."""

import re
import runpy
import xml.etree.ElementTree as ET
from base64 import b64decode, b64encode
from collections import Counter
from hashlib import sha256
from html.parser import HTMLParser
from itertools import product

import browser
import pytest
from console import call
from folders import ROOT
from helpers import compiled_of
from screenshots import PICTURES, SCREENSHOTS, STEP, digest_in
from torch import nn

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.lowering.step import Step
from planc.model.facts import Child, Facts, Module, Parameter
from planc.runtime.run import Run
from planc.syntax.plan_files import shipped_plans
from planc.tools.estimate import timeline
from planc.tools.estimate.answer import Request, answer
from planc.tools.estimate.from_plan import Batch
from planc.tools.show import changes, charts, html, mesh
from planc.tools.show.module_tree import tree
from planc.tools.show.page import Known, render
from planc.tools.show.picture import picture

LLAMA = ("llama-3.1-8b", "llama", "--world-size", "64", "--set", "tp=8")
PLANS = [
    ("llama-3.1-8b", "llama", ["tp=8"], 64),
    ("llama-3.2-1b", "llama", ["tp=2"], 8),  # tied embeddings
    ("gpt2", "gpt2", ["tp=2"], 8),
    ("deepseek-v3", "deepseek_v3", ["tp=8"], 64),  # blocks with and without experts
    ("gemma-3-4b", "gemma3_vision", ["tp=2"], 8),
    ("zamba2-2.7b", "zamba2", ["tp=2"], 8),  # blocks that share parameters
]
EVIL = '<script>alert("1")</script>'
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """The elements of a page as (name, attributes), and the text of each kind of element."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts = [], [], Counter()
        self.feed(text)
        self.close()
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        for name in set(self.open):
            self.texts[name] = f"{self.texts[name] or ''}{data}"

    def with_attribute(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def shown(*words, code=0):
    """The page that a command writes to standard output."""
    done = call("show", *words, "-o", "-")
    assert done[0] == code, done
    return done[1]


@pytest.fixture(scope="module")
def page():
    return shown(*LLAMA, *STEP)


def test_the_parts_of_a_page(page):
    read = Page(page)
    ids = read.with_attribute("id")
    assert len(ids) == len(set(ids)), "an id is there twice"
    assert {"mesh", "modules", "memory", "step", "calls", "why", "plan"} <= set(ids)
    assert "step" not in Page(shown(*LLAMA)).with_attribute("id")
    assert "optimizer state" in Page(shown(*LLAMA)).texts["section"]
    assert len([1 for name, a in read.elements if "data-keys" in a]) == 64
    for text in ("GiB a step", "working memory of", "forward of a micro-batch, x 8", "tokens/s"):
        assert text in read.texts["body"]
    assert "8 layers" not in shown(*LLAMA)  # 32 of them, and no number is cut


def test_nothing_is_loaded(page):
    """No address, no import, and a policy that forbids all but the page's own script."""
    assert not re.search(r"https?:|//\w|@import|url\(|\bsrc=|\bhref=|<link|<img", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    script = Page(page).texts["script"]
    known = b64encode(sha256(script.encode()).digest()).decode()
    assert policy == (f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{known}'")
    style = "style-src"
    assert policy.count(style) == 1 and not re.search(r'\son\w+="', page)


@pytest.mark.parametrize("case", PLANS, ids=lambda case: case[0])
def test_all_modules_and_all_bytes_are_there(case):
    """Each module is in one row, or inside a row that says which other one has the same inside."""
    compiled = compiled_of(*case)
    top, seen, like = tree(compiled), Counter(), []

    def visit(row):
        seen.update(row.modules.names())
        like.extend([row.modules] if row.like else [])
        for inner in row.inside:
            visit(inner)

    visit(top)
    assert set(seen.values()) == {1}
    names = {name for modules in compiled.facts.model.below() for name in modules.names()}
    below = {name for modules in like for m in modules.below() for name in m.names()}
    assert names == set(seen) | below
    assert top.size == compiled.lowered.parameters
    written = Page(render(compiled, Known())).with_attribute("data-module")
    assert len(written) == len(set(written)) and sum(map(bool, written)) == len(written)


def test_rows_say_what_the_operations_do():
    """Marks come from the lowered plan: the last block keeps its parameters, so it is a row."""
    top = tree(compiled_of(*PLANS[0]))
    layers = {row.name: row for row in top.inside[0].inside[1].inside}
    assert list(layers) == ["[0:31]", "[31]"] and layers["[31]"].like == "[0:31]"
    assert [m.text for m in layers["[0:31]"].marks] == ["checkpoint", "unit"]
    assert "reshard after forward" in layers["[0:31]"].marks[1].about
    assert "keep" in layers["[31]"].marks[1].about
    query = layers["[0:31]"].inside[0].inside[0]
    assert [(m.text, m.axes, m.place) for m in query.marks] == [
        ("colwise", ("tp",), "plans/llama.plan:7")
    ]


def test_stages_are_marked_once():
    compiled = compiled_of("llama-3.1-8b", "llama", ["tp=4", "pp=4"], 64)
    read = Page(render(compiled, Known()))
    chips = [c for c in read.with_attribute("class") if re.search(r"chip s\d", c)]
    assert Counter(c.split()[1] for c in chips) == {"s0": 2, "s1": 1, "s2": 1, "s3": 3}
    strips = [c for c in read.with_attribute("class") if c.startswith("strip ")]
    assert Counter(strips) == {f"strip s{i}": 16 for i in range(4)}
    assert "stage 3" in read.texts["section"]


def test_lines_of_the_plan_are_the_places_that_rows_name(page):
    read = Page(page)
    places = set(read.with_attribute("data-place"))
    named = {p for by in read.with_attribute("data-by") for p in by.split("\n") if p}
    assert named - places == {"--set tp=8"}
    assert len(named) > 12


MESHES = [
    ("llama-3.1-8b", "llama", ["tp=4", "dp_replicate=2", "pp=2"], 64),
    ("deepseek-v3", "deepseek_v3", ["tp=2", "ep=8"], 64),
    ("mixtral-8x7b", "mixtral", ["tp=1", "ep=4"], 64),
]


@pytest.mark.parametrize("case", MESHES, ids=lambda case: " ".join(case[2]))
def test_groups_are_those_of_the_mesh(case):
    """Each group's ranks, counted one by one, beside the axes as arrays."""
    lowered = compiled_of(*case).lowered
    sizes = {axis.name: axis.size for axis in lowered.axes}
    ranks = [dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values()))]
    assert [mesh.places(lowered, r) for r in range(lowered.world_size)] == ranks
    found = mesh.groups(lowered, 8, {})
    assert found
    for group in found:
        count = Counter(group.key(place, sizes) for place in ranks)
        assert set(count.values()) == {group.size}, group
        near = Counter(group.key(place, sizes) for place in ranks[:8])
        assert near[group.key(ranks[0], sizes)] == group.near
    if lowered.experts:
        names = {group.names for group in found}
        assert {(lowered.experts.ranks.name,)} <= names
        (experts,) = (g for g in found if g.names == (lowered.experts.ranks.name,))
        keys = [experts.key(place, sizes) for place in ranks]
        same = [rank for rank, key in enumerate(keys) if key == keys[0]]
        assert same == list(range(experts.size)), "the innermost ranks divide experts"


def test_an_estimate_is_drawn_as_it_is():
    """The parts of the picture add up to the estimate's own numbers."""
    compiled, sink = compiled_of(*PLANS[0]), Sink()
    batch = Batch(global_batch=64, sequence=8192, micro_batches=4)
    found = answer(*compiled.applied, Request(batch=batch), sink)
    assert found is not None and found.counted and not sink.has_errors
    bars = timeline.passes(found)
    times = [4 if "x 4" in title else 1 for title in bars]
    sums = [sum(part[1] for part in bar) for bar in bars.values()]
    whole = sum(a * b for a, b in zip(times, sums, strict=True))
    assert whole == pytest.approx(found.estimate.time.seconds, rel=1e-3)
    held = [sum(part[1] for part in bar) for bar in timeline.moments(found).values()]
    assert max(held) == found.estimate.fullest.peak
    step = Step(
        lowered=compiled.lowered,
        config=compiled.applied[1].config,
        batch=64,
        sequence=8192,
        micro_batches=4,
    )
    sent = timeline.bytes_sent(step)
    assert sent["tp"] > 0 and sent["dp_shard"] > 0
    drawn = {g.names: g.sent for g in mesh.groups(compiled.lowered, 8, sent)}
    assert drawn == {("tp",): sent["tp"], ("dp_shard",): sent["dp_shard"]}


def test_a_color_means_one_kind_and_each_is_explained():
    parts = {
        "loss": [("activations of x", 3.0, "", ""), ("working memory", 1.0, "how", "")],
        "end": [("gradients", 2.0, "", ""), ("gradients being reduced", 1.0, "", "")],
        "last": [("working memory", 2.0, "", ""), ("gradients", 1.0, "", "")],
    }
    read = Page("".join(charts.chart(parts, str, in_turn=False)))
    drawn = {a["title"].partition(":")[0]: a["class"] for n, a in read.elements if "title" in a}
    assert drawn["gradients"] == drawn["gradients being reduced"]
    assert len({drawn[name] for name in ("activations of x", "working memory", "gradients")}) == 3
    dots = [a["class"].split()[1] for n, a in read.elements if "dot" in a.get("class", "")]
    order = ("activations of x", "working memory", "gradients", "gradients being reduced")
    assert dots == [drawn[name] for name in order]
    assert read.texts["em"] == "3.02.02.01.0"


def test_what_takes_nothing_is_drawn_too():
    """Where a pipeline keeps all units gathered, its backward pass gathers none: 0 bytes."""
    read = Page("".join(charts.chart({"loss": [("x", 0.0, "how", "")]}, str, in_turn=False)))
    assert read.texts["em"] == "0.0"


def evil(folder):
    """A plan and a model whose every name is an attack, compiled."""
    parameter = Parameter(name=f"w{EVIL}", shape=(8, 8))
    inner = Module(cls=f"Linear{EVIL}", kind="linear", parameters=(parameter,))
    root = Module(cls=EVIL, kind="other", children=(Child(module=inner, name=f"fc{EVIL}"),))
    facts = Facts(name=EVIL, family="llama", config={}, config_name=EVIL, root=root)
    plan = folder / "<script>alert(2)<.plan"
    plan.write_text(
        f"plan p for llama # {EVIL}\nmesh {{\n dp_shard = auto\n}}\n"
        "fsdp on dp_shard {\n root : unit # </li></ol><img src=x onerror=alert(3)>\n}\n"
    )
    sink = Sink()
    compiled = compile_plan(facts, str(plan), sink, world_size=4)
    assert compiled.lowered is not None, list(sink)
    return compiled, tuple(sink)


def test_names_are_escaped(tmp_path):
    """Names of a model and the text of a plan are not trusted, wherever they are shown."""
    compiled, findings = evil(tmp_path)
    text = render(compiled, Known(findings=findings, numbers=(("proof", EVIL, EVIL),)))
    read = Page(text)
    assert [name for name, _ in read.elements].count("script") == 1
    assert not {"img", "iframe", "alert"} & {name for name, _ in read.elements}
    assert read.texts["script"] == html.package_files("page.js")
    for name in (EVIL, f"fc{EVIL}", "<img src=x onerror=alert(3)>"):
        assert name in read.texts["body"]
    assert f"fc{EVIL}" in read.with_attribute("data-module")
    drawn = ET.fromstring(picture(compiled.lowered, tree(compiled)))
    assert not [e for e in drawn.iter() if e.tag.endswith("script")]
    assert f"fc{EVIL}" in "".join(drawn.itertext())
    for shown_page in (
        changes.render(compiled.lowered, compiled.lowered, [EVIL]),
        changes.notebook(compiled.lowered),
    ):
        assert EVIL not in shown_page and "&lt;script&gt;" in shown_page
    assert html.tag("p", "<b>", title='"><b>') == '<p title="&quot;&gt;&lt;b&gt;">&lt;b&gt;</p>'


def test_a_picture_is_one_svg(tmp_path):
    file = tmp_path / "plan.svg"
    assert call("show", *LLAMA, "--svg", "-o", file) == (0, "", "")
    text = file.read_text()
    drawn = ET.fromstring(text)
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg" and "url(" not in text
    assert re.findall(r"https?://\S+?(?=\")", text) == ["http://www.w3.org/2000/svg"]
    words = [e.text for e in drawn.iter() if e.text]
    assert {"q_proj", "node 7", "63", "tp", "[0:31]"} <= set(words)
    nodes = [e for e in drawn if e.tag.endswith("}svg")]
    assert len({(e.get("x"), e.get("y")) for e in nodes}) == len(nodes) == 8


def test_the_site_draws_every_plan(tmp_path):
    """Two of them here; `make docs` draws the rest."""
    gallery = runpy.run_path(str(ROOT / "docs" / "gallery.py"))
    assert set(gallery["models"]()) == set(shipped_plans())
    folder = gallery["main"].__globals__["FOLDER"] = tmp_path / "gallery"
    gallery["main"](["classifier", "gemma3"])
    page = (folder / "README.md").read_text()
    assert page.count("--set tp=2") == 1 and "gemma-3-1b gemma3 --world-size 8 --svg" in page
    drawn = [folder / name for name in re.findall(r"\]\((\w+\.svg)\)", page)]
    assert len(drawn) == 2 and all("q_proj" in picture.read_text() for picture in drawn)


def test_output_is_whole_or_nothing(tmp_path):
    file = tmp_path / "page.html"
    file.write_text("before")
    for words in (["--set", "tp=0"], ["--batch", "64"], ["--batch", "7", "--seq", "8192"]):
        code, out, err = call("show", *LLAMA, *words, "-o", file)
        assert code in (1, 2) and "Traceback" not in err and "error[PL" in err and out == ""
        assert file.read_text() == "before"
    for bad in (tmp_path / "no" / "folder.html", tmp_path):
        code, out, err = call("show", *LLAMA, "-o", bad)
        assert (code, out) == (2, "") and "PL020" in err and "Traceback" not in err, err
        code, out, err = call("diff", *LLAMA, "--html", bad)
        assert (code, out) == (2, "") and "PL020" in err and "Traceback" not in err, err
    assert call("show", *LLAMA, "-o", file)[:2] == (0, "")
    assert file.read_text().endswith("</html>\n")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_lowered_plan_is_shown_without_its_text(tmp_path):
    file = tmp_path / "lowered.json"
    assert call("lower", *LLAMA, "--format", "json", "-o", file)[0] == 0
    read = Page(shown("llama-3.1-8b", str(file)))
    assert read.with_attribute("data-place") == []
    assert "plans/llama.plan:7" in read.texts["template"]
    assert "PL705" in call("show", "llama-3.1-8b", file, *STEP, "-o", "-")[2]


def test_a_diff_is_a_page(tmp_path):
    file = tmp_path / "diff.html"
    words = ("--new-set", "sequence=false", *STEP)
    assert call("diff", *LLAMA, *words, "--html", file) == (1, "", "")
    read = Page(file.read_text())
    cells = [a.get("class") for name, a in read.elements if name == "td"]
    assert len(cells) % 2 == 0 and cells.count("gone") > cells.count("come") > 2
    told = call("diff", *LLAMA, *words)[1]
    for line in told.splitlines():
        assert line.strip() in read.texts["body"], line
    assert call("diff", *LLAMA, "--html", file) == (0, "", "")
    read = Page(file.read_text())
    assert "No changes." in read.texts["pre"]
    assert not {"gone", "come"} & set(read.with_attribute("class"))


def test_notebooks_show_results():
    plans = [
        planc.lower("llama-3.1-8b", "llama", world_size=8, overrides=[f"tp={n}"]) for n in (2, 4)
    ]
    shown = plans[0]._repr_html_()
    read = Page(shown)
    (source,) = read.with_attribute("src")
    drawn = ET.fromstring(b64decode(source.removeprefix("data:image/svg+xml;base64,")))
    assert "node 0" in "".join(drawn.itertext())
    assert "tensor      on tp = 2" in read.texts["pre"] and "style" not in shown
    run = Run(model=nn.Module(), lowered=plans[0], digest="", meshes=None)
    assert run._repr_html_() == shown
    delta = planc.diff(*plans)
    assert "tp 2 -> 4" in Page(delta._repr_html_()).texts["pre"]
    assert "color:" in delta._repr_html_()


def test_large_meshes_stay_small():
    """A page does not grow with the ranks, nor with the depth of the model."""
    small, large = (
        render(compiled_of("llama-3.1-405b", "llama", ["tp=8"], n), Known()) for n in (64, 65536)
    )
    assert len(large) < 1.5 * len(small) < 300_000
    assert "more nodes" in large


def test_ranks_of_a_node_come_from_the_hardware(tmp_path):
    from planc.tools.estimate.profiles import FOLDER

    profile = tmp_path / "four.toml"
    text = (FOLDER / "h100-8x.toml").read_text()
    profile.write_text(text.replace("ranks_per_node = 8", "ranks_per_node = 4"))
    assert "8 nodes" in shown(*LLAMA)
    assert "16 nodes" in shown(*LLAMA, "--hardware", str(profile))


# in a browser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    if not (browser.CHROMIUM and browser.DRIVER):
        pytest.skip("no Chromium with its driver is installed")
    with browser.browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


def on(window):
    """What is lit: the names of modules and the lines of plans."""
    script = (
        "return [...document.querySelectorAll('.on')].map(e => e.dataset.module || e.dataset.place)"
    )
    return window.run(script)


def test_a_click_lights_both_sides(window, page, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page)
    window.open(file, 1400)
    window.click('[data-module="model.layers[0:31].self_attn.q_proj"]')
    lit = on(window)
    assert "model.layers[0:31].self_attn.q_proj" in lit and "plans/llama.plan:7" in lit
    assert "plans/blocks.plan:34" in lit, "the line of a block's checkpoint decides its modules too"
    told = window.run("return document.getElementById('why').innerText")
    script = """
        const parts = [...arguments].map((name) => document.querySelector(name));
        const [plan, line] = parts.map((part) => part.getBoundingClientRect());
        return plan.top < line.top && line.bottom < plan.bottom"""
    assert window.run(script, "#plan", "[data-place$='llama.plan:7']"), "the line is not in view"
    assert "colwise, on tp = 8" in told and "[4096, 4096] -> [512, 4096]" in told
    window.click('[data-place="plans/llama.plan:8"]')
    lit = on(window)
    assert "model.layers[0:31].mlp.up_proj" in lit and "model.layers[0:31].mlp.gate_proj" in lit
    assert "model.layers[0:31].self_attn.q_proj" not in lit
    window.click(".gpu:nth-of-type(4)")
    assert window.run("return document.getElementById('rank').textContent").startswith("rank 3")
    classes = window.run(
        "return [...document.querySelectorAll('.gpu')].map(e => e.className.baseVal)"
    )
    assert classes[3] == "gpu me" and classes[0] == "gpu g0" and classes[11] == "gpu g1"
    assert Counter(classes) == {"gpu me": 1, "gpu g0": 7, "gpu g1": 7, "gpu": 49}
    assert window.console() == []


def test_blocks_fold(window, page, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page)
    window.open(file, 1400)
    block = '[data-module="model.layers[0:31]"]'
    state = f"return document.querySelector('{block}').parentElement.open"
    caret = "return getComputedStyle(document.querySelector(arguments[0]), '::before').content"
    window.click(block)  # chooses it
    assert window.run(state) is True and window.run(caret, f"{block} code") == '"▾"'
    window.click(block)
    assert window.run(state) is False and window.run(caret, f"{block} code") == '"▸"'
    assert window.run(caret, "#calls summary") == '"▸"'
    window.click("#calls summary")
    assert window.run(caret, "#calls summary") == '"▾"'
    assert window.console() == []


@pytest.mark.parametrize("width", [400, 1400])
def test_no_page_is_wider_than_its_window(window, page, tmp_path, width):
    compiled, _ = evil(tmp_path)
    stages = compiled_of("llama-3.1-8b", "llama", ["tp=4", "pp=4"], 64)
    pages = {"page": page, "evil": render(compiled, Known()), "stages": render(stages, Known())}
    pages["diff"] = changes.render(compiled.lowered, stages.lowered)
    for name, text in pages.items():
        file = tmp_path / f"{name}.html"
        file.write_text(text)
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        window.command("Emulation.setDeviceMetricsOverride", **size)
        window.open(file, 1400)
        assert (
            window.run("return [innerWidth, document.documentElement.scrollWidth]") == [width] * 2
        )
        assert window.run("return document.querySelectorAll('script').length") == 1, name
        assert window.console() == [], name
    window.command("Emulation.clearDeviceMetricsOverride")


def test_both_sides_of_a_diff_are_seen(window, tmp_path):
    file = tmp_path / "diff.html"
    assert call("diff", *LLAMA, "--old-set", "tp=4", "--html", file)[0] == 1
    window.open(file, 1400)
    widths = "const e = document.querySelector('.wide'); return [e.clientWidth, e.scrollWidth]"
    inner, whole = window.run(widths)
    assert inner == whole > 1000


def test_names_stay_in_one_piece_on_a_narrow_page(window, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(render(compiled_of("wan2.1-t2v-14b", "wan", [], 8), Known()))
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    window.command("Emulation.setDeviceMetricsOverride", **size)
    window.open(file, 1400)
    script = """
        const tall = (e) => e.getBoundingClientRect().height > 24;
        const classes = [...document.querySelectorAll('.row small')];
        return [classes.length, classes.filter(tall).map((e) => e.textContent)]"""
    count, torn = window.run(script)
    assert count > 20 and torn == []
    window.command("Emulation.clearDeviceMetricsOverride")


def test_a_script_that_is_not_the_page_s_own_does_not_run(window, page, tmp_path):
    """The policy holds even if something were not escaped."""
    file = tmp_path / "page.html"
    file.write_text(page.replace("<body>", "<body><script>window.evil = 1</script>"))
    window.open(file, 1400)
    assert window.run("return [window.evil === undefined, acting.size > 3]") == [True, True]
    assert any("Content Security Policy" in message for message in window.console())


@pytest.mark.parametrize("name", SCREENSHOTS)
def test_the_pictures_of_the_docs_show_the_present_pages(name):
    found = digest_in((PICTURES / name).read_bytes())
    assert found == SCREENSHOTS[name].digest(), "run `make screenshots` and look at them"


def test_the_pictures_of_the_docs_are_small():
    sizes = {file.name: file.stat().st_size for file in PICTURES.glob("*.png")}
    assert sizes.keys() == SCREENSHOTS.keys() and max(sizes.values()) < 150_000
