"""Elaboration: what a plan means, and every mistake of meaning, each with its code and its line."""

import pytest

from planc.diagnostic import Sink
from planc.lowering import lower
from planc.model.load import load
from planc.ops.styles import Colwise, Replicate, Rowwise, Shard, style_text
from planc.plan import elaborate
from planc.source import Source
from planc.syntax import parse
from planc.syntax.plan_files import read

HEAD = "plan t for llama\n"
MESH = "mesh {\n dp_shard = auto\n tp = 2\n}\n"
UNITS = "fsdp on dp_shard {\n root : unit\n}\n"


@pytest.fixture(scope="module")
def llama():
    return load("llama-3.1-8b", Sink())


@pytest.fixture
def mean(llama):
    """Elaborates texts (bases first); gives the plan and the findings."""

    def run(*texts, world=8, settings=(), facts=None):
        sink = Sink()
        files = [parse(Source(f"{i}.plan", t), sink) for i, t in enumerate(texts)]
        assert not sink.failed, [d.message for d in sink]
        plan = elaborate(files, facts or llama, sink, world_size=world, settings=settings)
        return plan, sink

    return run


def codes(sink):
    return [d.code for d in sink if d.severity != "info"]


def tensor(text):
    return HEAD + MESH + "tensor on tp {\n" + text + "\n}\n" + UNITS


# Selectors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("lm_head", ["lm_head"]),
        ("model.layers.*", ["model.layers[0:32]"]),
        ("model.layers[0:4]", ["model.layers[0:4]"]),
        ("model.layers[-1]", ["model.layers[31]"]),
        ("model.layers[::2]", ["model.layers[0:31:2]"]),
        ("model.layers[0:3,5]", ["model.layers[0:3,5]"]),
        ("model.layers[-4:-1].mlp", ["model.layers[28:31].mlp"]),
        ("model.layers.3", ["model.layers[3]"]),
        (
            "model.layers.*.mlp.{gate,up}_proj",
            ["model.layers[0:32].mlp.gate_proj", "model.layers[0:32].mlp.up_proj"],
        ),
        ("model.layers.*.self_attn.o_*", ["model.layers[0:32].self_attn.o_proj"]),
        ("**<LlamaMLP>", ["model.layers[0:32].mlp"]),
        ("model.layers.*<LlamaDecoderLayer>", ["model.layers[0:32]"]),
        ("model.layers.* has mlp<LlamaMLP>", ["model.layers[0:32]"]),
        ("model.**.v_proj", ["model.layers[0:32].self_attn.v_proj"]),
        ("{model.layers[0:2],model.layers[2:4]}", ["model.layers[0:4]"]),
    ],
)
def test_selectors(mean, selector, names):
    plan, sink = mean(
        HEAD + MESH.replace("2", "1") + f"checkpoint {{\n {selector} : full\n}}\n" + UNITS
    )
    assert codes(sink) == []
    assert [str(r.modules) for r in plan.checkpoint] == names


@pytest.mark.parametrize(
    ("selector", "message", "told"),
    [
        ("model.layers.*.self_atn", "has no `self_atn`", "`self_attn`"),
        ("model.layers.self_attn", "`model.layers` has no `self_attn`", "model.layers.*.self_attn"),
        ("layers.*", "the model has no `layers`", "`model.layers`"),
        ("model.layers[40]", "has 32 entries, none of them in `[40]`", None),
        ("model.layers.*<LlamaBlock>", "what is there is LlamaDecoderLayer", None),
        ("model.layers.* has mlp<Other>", "none of it has `mlp`", None),
        ("model.layers.*.mlp.{gate,upp}_proj", "has no `upp_proj`", "`up_proj`"),
        ("model.norm.*", "`model.norm` has no modules inside", None),
    ],
)
def test_a_selector_that_matches_nothing(mean, selector, message, told):
    _, sink = mean(HEAD + MESH + f"tensor on tp {{\n {selector} : colwise\n}}\n" + UNITS)
    assert codes(sink) == ["PL101"]
    [finding] = [d for d in sink if d.code == "PL101"]
    assert message in finding.message
    assert finding.labels[0].span.text == selector
    assert (told or "") in (finding.help or "")


def test_optional_may_match_nothing(mean):
    plan, sink = mean(tensor(" optional model.vision : colwise\n lm_head : colwise(-> replicate)"))
    assert codes(sink) == []
    assert [str(r.modules) for r in plan.tensor] == ["lm_head"]


def test_blocks_and_lets_are_relative(mean):
    text = HEAD + MESH + "let block = model.layers.*\nlet inner = mlp.{up,gate}_proj\n"
    text += "tensor on tp {\n $block {\n  $inner : colwise\n"
    text += "  self_attn {\n   o_proj : rowwise\n  }\n }\n}\n"
    plan, sink = mean(text + UNITS)
    assert codes(sink) == []
    assert [str(r.modules).split(".", 2)[2] for r in plan.tensor] == [
        "mlp.up_proj",
        "mlp.gate_proj",
        "self_attn.o_proj",
    ]


def test_layers_that_differ_are_one_set_where_they_are_alike():
    """gemma3's sliding and full layers differ as blocks, not in their projections."""
    sink = Sink()
    facts = load("gemma-3-1b", sink)
    plan = elaborate(read("gemma3", sink), facts, sink, world_size=8, settings=["tp=2"])
    assert codes(sink) == []
    found = {str(r.modules) for r in plan.tensor}
    assert "model.layers[0:26].self_attn.q_proj" in found


# Styles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "style"),
    [
        ("lm_head : colwise", Colwise()),
        ("lm_head : colwise(-> replicate)", Colwise(output=Replicate())),
        ("lm_head : rowwise(-> shard(1), local = false)", Rowwise(output=Shard(1), local=False)),
        ("model.embed_tokens : rowwise", Rowwise(input=Replicate())),
        ("model.embed_tokens : rowwise(-> shard(1))", Rowwise(input=Replicate(), output=Shard(1))),
    ],
)
def test_styles(mean, written, style):
    plan, sink = mean(tensor(written))
    assert codes(sink) == []
    assert plan.tensor[0].style == style


def test_a_style_prints_as_it_is_written(mean):
    for text in ("colwise(shard(1) -> replicate)", "sequence(dim = 2, local = true)"):
        plan, _ = mean(tensor(f"lm_head : {text}"))
        assert style_text(plan.tensor[0].style) == text
    text = "input(shard(1) -> replicate, null, mask = replicate -> shard(0), local = true)"
    plan, _ = mean(tensor(f"lm_head : {text}"))
    assert style_text(plan.tensor[0].style) == text


# Every mistake, once -----------------------------------------------------------------------------

SECTION = "checkpoint {\n lm_head : full\n}\n"
MISTAKES = [
    ("PL009", MESH + UNITS, "0.plan:1"),
    (
        "PL010",
        HEAD + MESH + tensor("lm_head : colwise")[len(HEAD + MESH) :] + "pipeline {\n}\n",
        "12",
    ),
    ("PL170", HEAD + 'style rowwise = python "a:B"\n' + MESH.replace("2", "1") + UNITS, "2"),
    ("PL171", HEAD + 'style x = python "a.B"\n' + MESH.replace("2", "1") + UNITS, "2"),
    ("PL011", HEAD + MESH.replace("2", "1") + UNITS + "fsdpp {\n}\n", "9"),
    ("PL011", HEAD + "mesh {\n lm_head : unit\n tp = 1\n}\n", "3"),
    ("PL012", tensor("lm_head : colwise(shard(1))"), "7"),
    ("PL012", tensor("lm_head : colwise(-> shared(1))"), "7"),
    ("PL012", tensor("lm_head : colwise(locl = true)"), "7"),
    ("PL012", tensor("lm_head : sequence(dim = true)"), "7"),
    ("PL012", tensor("lm_head : input"), "7"),
    (
        "PL012",
        HEAD + MESH.replace("2", "1") + "fsdp on dp_shard {\n root : unit(reshard = nevr)\n}\n",
        "7",
    ),
    (
        "PL012",
        HEAD + MESH.replace("2", "1") + "fsdp on dp_shard {\n root : unit(reshard = 0)\n}\n",
        "7",
    ),
    (
        "PL012",
        HEAD
        + MESH.replace("2", "1")
        + "fsdp on dp_shard {\n precision(param = int8)\n root : unit\n}\n",
        "7",
    ),
    ("PL100", HEAD + MESH.replace("2", "nodes") + UNITS, "4"),
    ("PL100", HEAD + MESH.replace("2", "config.heads") + UNITS, "4"),
    ("PL102", tensor("lm_head : colwise\n lm_head : rowwise"), "8"),
    (
        "PL102",
        tensor("model.layers.*.mlp.up_proj : colwise\n model.layers[3].mlp.up_proj : rowwise"),
        "8",
    ),
    ("PL103", tensor("override lm_head : colwise"), "7"),
    (
        "PL103",
        HEAD + 'override let a = 1\nrequire a == 1 ""\n' + MESH.replace("2", "1") + UNITS,
        "2",
    ),
    ("PL103", HEAD + MESH.replace("2", "1") + UNITS + "override compile {\n}\n", "9"),
    ("PL104", HEAD + "option unused = 1\n" + MESH.replace("2", "1") + UNITS, "2"),
    ("PL105", tensor("lm_head : columnwise"), "7"),
    ("PL105", HEAD + MESH.replace("2", "1") + UNITS + "checkpoint {\n lm_head : ful\n}\n", "10"),
    (
        "PL107",
        HEAD + 'let a = 1\nlet a = 2\nrequire a == 1 ""\n' + MESH.replace("2", "1") + UNITS,
        "3",
    ),
    (
        "PL108",
        HEAD + 'let a = b\nlet b = a\nrequire a == 1 ""\n' + MESH.replace("2", "1") + UNITS,
        "3",
    ),
    ("PL109", HEAD + 'require 1 + "2" == 3 ""\n' + MESH.replace("2", "1") + UNITS, "2"),
    ("PL109", HEAD + 'require 1 ""\n' + MESH.replace("2", "1") + UNITS, "2"),
    ("PL109", HEAD + 'require 1 / 0 == 1 ""\n' + MESH.replace("2", "1") + UNITS, "2"),
    (
        "PL110",
        HEAD + 'require config.hidden_size == 1 "no"\n' + MESH.replace("2", "1") + UNITS,
        "2",
    ),
    (
        "PL112",
        HEAD + MESH.replace("2", "1") + "checkpoint {\n model.layers[0:1:2:3] : full\n}\n" + UNITS,
        "7",
    ),
    ("PL300", HEAD + MESH.replace("2", '"2"') + UNITS, "4"),
    ("PL300", HEAD + MESH.replace("2", "0") + UNITS, "4"),
    ("PL300", HEAD + MESH.replace("2", "-3") + UNITS, "4"),
    ("PL300", HEAD + MESH.replace("2", "true") + UNITS, "4"),
    ("PL300", HEAD + MESH.replace("2", "1.5") + UNITS, "4"),
    ("PL301", HEAD + "mesh {\n dp_shard = 3\n}\n" + UNITS, "3"),
    ("PL302", HEAD + MESH.replace("2", "auto") + UNITS, "3"),
    ("PL303", HEAD + MESH.replace("2", "3") + UNITS, "3"),
    ("PL304", HEAD + MESH.replace("tp", "dp_shard") + UNITS, "4"),
    ("PL305", HEAD + MESH.replace("2", "1") + UNITS.replace("dp_shard", "dp_shrd"), "6"),
    ("PL305", HEAD + MESH.replace("2", "1") + UNITS + "tensor {\n}\n", "9"),
    ("PL306", HEAD + MESH + UNITS, "4"),
    ("PL308", HEAD + UNITS, "1"),
    (
        "PL310",
        HEAD + MESH.replace("2", "1") + UNITS.replace(" {", ", replicate on dp_shard {"),
        "6",
    ),
    ("PL650", MESH.replace("2", "1").join(["plan t for qwen3\n", UNITS]), "1"),
]


@pytest.mark.parametrize(("code", "text", "line"), MISTAKES)
def test_every_mistake(mean, code, text, line):
    _, sink = mean(text)
    assert code in codes(sink)
    first = next(d for d in sink if d.code == code)
    assert str(first.labels[0].span.line) == line.rpartition(":")[2]


@pytest.mark.parametrize("setting", ["tpp=2", "tp", "=2", "sequence=1"])
def test_a_setting_that_names_nothing(mean, setting):
    text = HEAD + "option sequence = true\n" + MESH + "when sequence {\n}\n" + UNITS
    _, sink = mean(text, settings=[setting])
    assert "PL106" in codes(sink)


def test_everything_in_one_run(mean):
    text = tensor("lm_hed : colwise\n lm_head : columnwise\n model.norm : sequence(dmi = 1)")
    _, sink = mean(text.replace("root : unit", "root : unit\n lm_head : unit(reshard = 0)"))
    assert sorted(codes(sink)) == ["PL012", "PL012", "PL101", "PL105"]


def test_options_and_conditions(mean):
    text = (
        HEAD
        + 'option way = "a"\n'
        + MESH
        + 'tensor on tp {\n when way == "a" {\n  lm_head : colwise\n'
    )
    text += " } else {\n  lm_head : rowwise\n }\n}\n" + UNITS
    assert isinstance(mean(text)[0].tensor[0].style, Colwise)
    assert isinstance(mean(text, settings=["way=b"])[0].tensor[0].style, Rowwise)


# Loading -----------------------------------------------------------------------------------------


def loading(*settings):
    lines = "\n ".join(settings)
    return HEAD + MESH.replace("2", "1") + f"load {{\n {lines}\n}}\n" + UNITS


def test_how_weights_arrive(mean):
    plan, sink = mean(loading("init = meta", 'weights = "rank0"', "dtype = bf16"))
    assert codes(sink) == []
    assert (plan.load.meta, plan.load.weights, plan.load.dtype) == (True, "rank0", "bfloat16")
    assert plan.load.origin.line == 7
    assert mean(loading())[0].load is None
    more = "plan u for llama\nload {\n override weights = slices\n}\n"
    plan, sink = mean(loading("weights = rank0"), more)
    assert codes(sink) == [] and plan.load.weights == "slices"


def test_parameters_are_counted_in_the_type_that_they_are_kept_in(mean, llama):
    sizes = {}
    for dtype in ("bf16", "fp32"):
        plan, _ = mean(loading(f"dtype = {dtype}"))
        sizes[dtype] = lower(plan, llama).parameters
    assert sizes["fp32"] == 2 * sizes["bf16"] > 0


@pytest.mark.parametrize(
    ("code", "settings", "line"),
    [
        ("PL012", ["weights = disk"], 7),
        ("PL012", ["init = cpu"], 7),
        ("PL012", ["dtype = int8"], 7),
        ("PL012", ["dtype = 16"], 7),
        ("PL102", ["weights = slices", "weights = rank0"], 8),
        ("PL103", ["override weights = rank0"], 7),
        ("PL105", ["weigths = slices"], 7),
        ("PL011", ["lm_head : unit"], 7),
    ],
)
def test_mistakes_of_loading(mean, code, settings, line):
    plan, sink = mean(loading(*settings))
    assert codes(sink) == [code]
    assert next(iter(sink)).labels[0].span.line == line
    assert "load" in plan.broken


def test_a_misspelt_word_is_told_the_one_it_looks_like(mean):
    _, sink = mean(loading("weights = slice"))
    assert next(iter(sink)).help == "did you mean `slices`?"
    _, sink = mean(loading("weights = disk"))
    assert next(iter(sink)).help is None


@pytest.mark.parametrize(
    ("stages", "text", "kept"),
    [(1, "", True), (2, "", False), (2, "(reshard = always)", True), (2, "(reshard = 2)", 2)],
)
def test_units_of_pipeline_stages_keep_their_parameters(mean, stages, text, kept):
    """By default: what one microbatch let go the next would gather again."""
    mesh = f"mesh {{\n pp = {stages}\n dp_shard = auto\n}}\n"
    plan, _ = mean(f"{HEAD}{mesh}fsdp on dp_shard {{\n model.layers.* : unit{text}\n}}\n")
    assert {u.reshard for u in plan.fsdp.units} == {kept}


# Checkpoints -------------------------------------------------------------------------------------


def remat(rule, *texts, more=""):
    return HEAD + MESH.replace("2", "1") + f"checkpoint {{\n {rule}\n}}\n" + more + UNITS


def test_what_a_checkpoint_saves(mean):
    text = 'option n = 2\noption way = "matmul"\n' + remat(
        'lm_head : ops(save = [attention, matmul(every = n), "aten.topk.default"])\n'
        " model.norm : ops(save = [way], offload = cpu, pin = false, preserve_rng = false)\n"
        ' model.layers.* : full(early_stop = false, offload = "none")'
    ).removeprefix(HEAD)
    plan, sink = mean(HEAD + text)
    assert codes(sink) == []
    head, norm, blocks = plan.checkpoint
    assert [(s.name, s.every) for s in head.save] == [
        ("attention", 1),
        ("matmul", 2),
        ("aten.topk.default", 1),
    ]
    assert "aten.mm.default" in head.save[1].ops and not head.offload
    assert [s.name for s in norm.save] == ["matmul"]
    assert (norm.offload, norm.pin, norm.preserve_rng, norm.early_stop) == (
        True,
        False,
        False,
        True,
    )
    assert (blocks.save, blocks.offload, blocks.early_stop) == ((), False, False)


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("PL012", "lm_head : ops"),
        ("PL012", "lm_head : ops(save = attention)"),
        ("PL012", "lm_head : ops(save = [])"),
        ("PL012", "lm_head : ops(save = [3])"),
        ("PL109", "lm_head : ops(save = [model.*])"),
        ("PL012", "lm_head : ops(save = [matmul(every = 0)])"),
        ("PL012", "lm_head : ops(save = [matmul(evry = 2)])"),
        ("PL012", "lm_head : ops(save = [matmul], offload = gpu)"),
        ("PL012", "lm_head : full(pin = false)"),
        ("PL012", "lm_head : full(save = [matmul])"),
        ("PL012", "lm_head : none(offload = cpu)"),
        ("PL105", "lm_head : op(save = [matmul])"),
        ("PL470", "lm_head : ops(save = [atention])"),
        ("PL470", 'lm_head : ops(save = ["aten.mm"])'),
        ("PL470", 'lm_head : ops(save = ["aten.nothing.default"])'),
        ("PL471", 'lm_head : ops(save = ["aten.matmul.default"])'),
        ("PL472", 'lm_head : ops(save = [matmul, "aten.mm.default"])'),
        ("PL472", "lm_head : ops(save = [reduce, reduce])"),
    ],
)
def test_mistakes_of_checkpoints(mean, code, rule):
    plan, sink = mean(remat(rule))
    assert codes(sink) == [code]
    assert next(iter(sink)).labels[0].span.line == 7
    assert plan.broken == {"checkpoint"} and not plan.checkpoint


def test_the_nearest_operators_are_told(mean):
    (found,) = mean(remat('lm_head : ops(save = ["aten.mm"])'))[1]
    assert "`aten.mm.default`" in found.help
    (found,) = mean(remat("lm_head : ops(save = [atention])"))[1]
    assert found.help == "did you mean `attention`?"


def test_an_operator_of_another_library_is_left_to_apply(mean):
    plan, sink = mean(remat('lm_head : ops(save = ["mylib.attend.default"])'))
    assert codes(sink) == [] and plan.checkpoint[0].save[0].ops == ("mylib.attend.default",)


# Extending ---------------------------------------------------------------------------------------


def test_an_override_replaces_only_what_it_meets(mean):
    base = HEAD + MESH.replace("2", "1") + "checkpoint {\n model.layers.* : full\n}\n" + UNITS
    more = "plan u for llama\ncheckpoint {\n override model.layers[::2] : none\n}\n"
    plan, sink = mean(base, more)
    assert codes(sink) == [] and plan.name == "u"
    assert [str(r.modules) for r in plan.checkpoint] == ["model.layers[1:32:2]"]


def test_a_section_is_overridden_whole(mean):
    more = "plan u for llama\noverride fsdp on dp_shard {\n lm_head : unit\n root : unit\n}\n"
    plan, sink = mean(HEAD + MESH.replace("2", "1") + UNITS, more)
    assert codes(sink) == []
    assert [str(u.members[0]) for u in plan.fsdp.units] == ["lm_head", "root"]


def test_an_axis_is_overridden(mean):
    plan, sink = mean(
        tensor("lm_head : colwise"), "plan u for llama\nmesh {\n override tp = 4\n}\n"
    )
    assert codes(sink) == []
    assert [(a.name, a.size) for a in plan.mesh.axes] == [("dp_shard", 2), ("tp", 4)]


def test_plans_that_extend_each_other(tmp_path):
    (tmp_path / "a.plan").write_text('plan a for llama\nextend "b.plan"\n')
    (tmp_path / "b.plan").write_text('plan b for llama\nextend "a.plan"\n')
    sink = Sink()
    read(str(tmp_path / "a.plan"), sink)
    assert [d.code for d in sink] == ["PL008"]


@pytest.mark.parametrize("name", ["nothere.plan", "lama", ".", "HEAD~1:nothere.plan", "x\0y"])
def test_a_plan_that_cannot_be_read(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = Sink()
    assert read(name, sink) == ()
    assert [d.code for d in sink] == ["PL006"]


# Lowering ----------------------------------------------------------------------------------------


def test_units_are_ordered_inner_first(mean, llama):
    text = (
        HEAD + MESH.replace("2", "1") + "fsdp on dp_shard {\n root : unit\n model.layers.* : unit\n"
    )
    plan, _ = mean(text + " model.layers.*.mlp : unit\n}\n")
    order = [str(op.members[0]) for op in lower(plan, llama).ops if hasattr(op, "members")]
    assert order == ["model.layers[0:32].mlp", "model.layers[0:32]", "root"]


def test_bytes_add_up(mean, llama):
    """Without sharding a rank holds the whole model: 8,030,261,248 parameters of two bytes."""
    text = HEAD + MESH.replace("2", "1") + UNITS
    plan, _ = mean(text, world=1)
    size = {"bfloat16": 2, "float32": 4}[llama.root.children[1].module.parameters[0].dtype]
    assert lower(plan, llama).parameters == 8_030_261_248 * size
    plan, _ = mean(text, world=8)
    assert lower(plan, llama).parameters == 8_030_261_248 * size // 8


def test_tensor_parallelism_over_one_rank_lowers_to_nothing(mean, llama):
    plan, _ = mean(tensor("lm_head : colwise").replace("tp = 2", "tp = 1"))
    assert [type(op).__name__ for op in lower(plan, llama).ops] == ["Configure", "FullyShard"]
