"""The optimizer section: which rule steps what, Muon by owners, and faults that the proof sees."""

import math

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from helpers import codes, compiled_of, simulated, slow

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.ops.optimizer import Optimize
from planc.runtime.gradients import required_rate
from planc.runtime.standalone import kept_states
from planc.runtime.standalone import optimizer as standalone
from planc.runtime.standalone.kept_states import create_state as kept_states_kept
from planc.runtime.standalone.optimizer import PlannedOptimizer, optimize, planned_optimizer

LLAMA = """
plan t for llama
extend "llama.plan"
optimizer {
    root                      : adamw
    model.layers.*.*layernorm : adamw(weight_decay = 0)
    model.layers.*.self_attn.{q,k,v}_proj : muon(per = head)
    model.layers.*.self_attn.o_proj       : muon
    model.layers.*.mlp.*_proj             : muon(adjust_lr = match_rms_adamw)
}
"""
PHI3 = """
plan t for phi3
extend "phi3.plan"
optimizer {
    root                           : adamw
    model.layers.*.self_attn.qkv_proj : muon(parts = [5120, 1280, 1280])
    model.layers.*.self_attn.o_proj   : muon
    model.layers.*.mlp.*proj          : muon(lr = 0.5)
}
"""
MOE = """
plan t for qwen3_moe
extend "qwen3_moe.plan"
optimizer {
    root                             : sgd(momentum = 0.9)
    model.layers.*.self_attn.*_proj  : muon(nesterov = false)
    model.layers.*.mlp.experts       : muon
}
"""
ADAFACTOR = """
plan t for phi3
extend "phi3.plan"
optimizer {
    root                      : adafactor
    model.layers.*.*layernorm : adamw
}
"""


EIGHT = """
plan t for llama
extend "llama.plan"
optimizer {
    root                            : adamw(state = int8, offload = states)
    model.layers.*.self_attn.q*     : sgd(momentum = 0.9, state = int8, block = 128)
    model.layers.*.self_attn.o_proj : muon(state = int8)
}
"""


def written(tmp_path, text):
    path = tmp_path / "t.plan"
    path.write_text(text.lstrip())
    return path


@pytest.mark.parametrize(
    ("model", "text", "settings"),
    [
        ("llama-3.1-8b", LLAMA, ["tp=2"]),
        slow("llama-3.1-8b", LLAMA, ["dp_replicate=2"]),
        slow("llama-3.2-1b", LLAMA, ["tp=2"]),  # tied
        slow("llama-3.1-8b", LLAMA, ["pp=2", "tp=2", "microbatches=2"]),
        ("phi-4", PHI3, ["tp=2"]),
        ("phi-4", ADAFACTOR, ["tp=2"]),
        ("qwen3-30b-a3b", MOE, ["ep=2", "tp=2", "etp=2"]),
        slow("qwen3-30b-a3b", MOE, ["ep=4"]),
    ],
)
def test_right_plans_are_proved(model, text, settings, tmp_path, uncached):
    verdict, findings = simulated(model, written(tmp_path, text), settings)
    assert (verdict.verdict, [f for f in findings if f.severity == "error"]) == ("proved", [])
    assert 0 < verdict.outcome.parameters < 1e-3


@pytest.mark.parametrize(
    ("model", "family", "settings"),
    [
        ("llama-3.1-8b", "llama", ["tp=2"]),
        slow("phi-4", "phi3", ["tp=2", "dp_replicate=2"]),
        slow("qwen3-30b-a3b", "qwen3_moe", ["ep=4"]),
    ],
)
def test_states_in_eight_bits_and_on_the_host_are_proved(
    model, family, settings, tmp_path, uncached
):
    """With the gradients of one process the steps are those of one process, so bits are equal."""
    path = written(tmp_path, EIGHT.replace("llama", family))
    verdict, _ = simulated(model, path, settings)
    assert verdict.verdict == "proved"
    assert verdict.outcome.parameters < 1e-5


def _own_shard(bucket, updates, group, dtype):
    """Every rank orthogonalizes what it holds."""
    return [standalone.orthogonal(u[None].to(dtype), group["ns_steps"])[0] for u in updates]


def _whole_of(real):
    return lambda p, order, cut, **k: real(p, order, (), **k)


def _stored_order(real):
    return lambda p, order, cut, **k: real(p, None, cut, **k)


def _local_factor(bucket, whole, group, dtype):
    for matrix in whole:
        turned = standalone.orthogonal(matrix[None].to(dtype), group["ns_steps"])[0]
        matrix.copy_(turned * math.sqrt(max(1.0, 0.25 * matrix.shape[0] / matrix.shape[1])))


def _averaged(real):
    """Pieces come back in halves."""
    return lambda *a, **k: [x / 2 for x in real(*a, **k)]


FAULTS = {
    "shard": (LLAMA, "llama-3.1-8b", "Bucket.orthogonalize", lambda _: _own_shard),
    "halves": (LLAMA, "llama-3.1-8b", "Bucket.orthogonalize", _averaged),
    "order": (PHI3, "phi-4", "units_of", _stored_order),
    "fused": (PHI3, "phi-4", "units_of", _whole_of),
    "sums": (
        ADAFACTOR,
        "phi-4",
        "Factored.all_reduce",
        lambda _: lambda _self, tensors: [*tensors],
    ),
    "factor": (LLAMA, "llama-3.1-8b", "Bucket.turn", lambda _: _local_factor),
}


@pytest.mark.parametrize("fault", [name if name != "halves" else slow(name) for name in FAULTS])
def test_faults_of_the_update_are_seen(fault, tmp_path, monkeypatch, uncached):
    """Gradients are right in all of them: only parameters after the steps tell. The ranks alone
    are wrong; the single process, which has no process group, computes as it should.
    """
    text, model, name, wrong = FAULTS[fault]
    owner, _, attribute = f"{standalone.__name__}.{name}".rpartition(".")
    where = getattr(standalone, name.partition(".")[0]) if "." in name else standalone
    real = getattr(where, attribute)
    broken = wrong(real)

    def on_ranks(*args, **keywords):
        first = args[0]
        bucket = isinstance(first, standalone.Bucket | standalone.Factored)
        alone = first.group is None if bucket else not hasattr(first, "placements")
        return (real if alone else broken)(*args, **keywords)

    assert owner
    monkeypatch.setattr(where, attribute, on_ranks)
    verdict, findings = simulated(model, written(tmp_path, text), ["tp=2"])
    assert verdict.verdict == "refuted"
    assert codes(findings) == ["PL509"]


def test_a_state_of_another_dtype_is_seen(tmp_path, monkeypatch, uncached):
    real = standalone.state_like

    def other(parameter, state, name, group):
        sharded = hasattr(parameter, "placements")
        return real(parameter, state, name, {**group, "state": torch.bfloat16 if sharded else None})

    monkeypatch.setattr(standalone, "state_like", other)
    verdict, _ = simulated("llama-3.1-8b", written(tmp_path, LLAMA), ["tp=2"])
    assert verdict.verdict == "refuted"


def _other_block(values, parameter, name, group):
    """Blocks of ranks are twice as long as those of one process."""
    wide = {"block": group["block"] * (1 + hasattr(parameter, "placements"))}
    return kept_states_kept(values, parameter, name, {**group, **wide})


def _not_rounded(values, parameter, name, group):
    sharded = hasattr(parameter, "placements")
    return values if sharded else kept_states_kept(values, parameter, name, group)


@pytest.mark.parametrize("fault", [_other_block, slow(_not_rounded)])
def test_states_in_other_blocks_are_seen(fault, tmp_path, monkeypatch, uncached):
    monkeypatch.setattr(kept_states, "create_state", fault)
    text = 'plan t for llama\nextend "llama.plan"\noptimizer { root : adamw(state = int8) }\n'
    verdict, _ = simulated("llama-3.1-8b", written(tmp_path, text), ["tp=2"])
    assert verdict.verdict == "refuted"
    assert verdict.outcome.parameters > 2e-3


def test_blocks_that_a_mesh_cuts_name_those_that_fit(tmp_path):
    """qwen3-30b-a3b has experts of 768 features: 384 on two ranks."""
    text = 'plan t for qwen3_moe\nextend "qwen3_moe.plan"\noptimizer {\n'
    path, sink = written(tmp_path, text + " root : adamw(state = int8)\n}\n"), Sink()
    settings = ["ep=2", "tp=2", "etp=2"]
    compile_plan("qwen3-30b-a3b", str(path), sink, world_size=8, settings=settings)
    [first] = [d for d in sink if d.code == "PL590"]
    assert "a rank has 384 numbers of a row" in first.facts[0]
    assert "`block = 128`" in first.help
    path, sink = written(tmp_path, text + " root : adamw(state = int8, block = 128)\n}\n"), Sink()
    compile_plan("qwen3-30b-a3b", str(path), sink, world_size=8, settings=settings)
    assert "PL590" not in codes(sink)


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_are_those_of_bitsandbytes_and_read_to_the_same(signed):
    values = torch.randn(5, 7, 700) * 10 ** torch.randn(5, 7, 1)
    values = values if signed else values.square()
    values[2] = 0
    codes = kept_states.dynamic_codes(signed)
    assert torch.equal(codes, create_dynamic_map(signed))
    state = kept_states.KeptState(values, 256, signed=signed, host=False)
    read = state.read_as(values)
    assert 1e-3 < (read - values).norm() / values.norm() < 2e-2
    assert read[2].count_nonzero() == 0
    again = kept_states.KeptState(read, 256, signed=signed, host=False)
    assert all(map(torch.equal, state.parts, again.parts))
    assert [part.numel() for part in state.parts] == [5 * 7 * 768, 5 * 7 * 3]


def test_adamw_in_eight_bits_is_near_torchs():
    module = torch.nn.Linear(12, 5)
    terms = {"algorithm": "adamw", "betas": (0.8, 0.99), "eps": 1e-7, "block": 4, "host": True}
    mine = _trained(lambda m: _planned(m, **terms), module)
    right = _trained(
        lambda m: torch.optim.AdamW(
            m.parameters(), lr=0.02, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-7
        ),
        module,
    )
    assert 1e-5 < (mine[0] - right[0]).abs().max() < 5e-3


def test_a_state_dict_has_values_whatever_keeps_them():
    module = torch.nn.Linear(12, 5)
    terms = {"betas": (0.8, 0.99), "eps": 1e-7, "block": 4, "host": True}
    one = _planned(module, algorithm="adamw", **terms)
    module(torch.randn(3, 12)).square().sum().backward()
    one.step()
    saved = one.state_dict()
    assert saved["state"][0]["exp_avg"].shape == (5, 12)
    for more in (terms, {**terms, "block": 0, "host": False}):
        other = _planned(module, algorithm="adamw", **more)
        other.load_state_dict(saved)
        loaded = other.state_dict()["state"][0]
        assert torch.equal(loaded["exp_avg"], saved["state"][0]["exp_avg"])
        assert torch.equal(loaded["exp_avg_sq"], saved["state"][0]["exp_avg_sq"])
        kinds = {type(value) for value in other.state[module.weight].values()}
        assert (kept_states.KeptState in kinds) == (more is terms)


@pytest.mark.parametrize(
    ("said", "per_element", "copied"),
    [("", 8, 0), ("state = int8", 2 + 8 / 256, 0), ("offload = states", 0, 16)],
)
def test_estimates_count_states_where_they_are(said, per_element, copied, tmp_path):
    text = 'plan t for llama\nextend "llama.plan"\noptimizer {{ root : adamw({}) }}\n'
    path = str(written(tmp_path, text.format(said)))
    found = planc.estimate("llama-3.2-1b", path, world_size=8, batch=8, seq=1024)
    [rank] = found.estimate.ranks
    size = {item.name: item.size for moment in rank.moments for item in moment.items}
    shard = size["parameters"] / 4
    assert size.get("optimizer state", 0) / shard == pytest.approx(per_element, rel=1e-3)
    assert found.estimate.time.spent.optimizer * found.hardware.host_gb_s * 1e9 > copied * shard


def test_the_innermost_rule_steps_a_parameter(tmp_path):
    """A bias inside a `muon` rule goes to the next rule around it that takes vectors."""
    text = """
plan t for qwen2
extend "llama.plan"
optimizer {
    root                     : adamw(lr = 0.5)
    model.layers.*.self_attn : muon
    model.layers.*.mlp       : sgd
}
"""
    ops = compiled_of("qwen2.5-7b", written(tmp_path, text)).lowered.ops
    ops = [op for op in ops if isinstance(op, Optimize)]
    assert [(str(op.modules), op.headline()) for op in ops] == [
        ("root", "adamw, lr x 0.5"),
        ("model.layers[0:28].mlp", "sgd"),
        ("model.layers[0:28].self_attn.q_proj", "muon"),
        ("model.layers[0:28].self_attn.k_proj", "muon"),
        ("model.layers[0:28].self_attn.v_proj", "muon"),
        ("model.layers[0:28].self_attn.o_proj", "muon"),
    ]
    assert {name for op in ops[2:] for name, _ in op.algorithm.units} == {"weight"}


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ("model.layers.* : adamw", "PL575"),
        ("root : adamw\n model.embed_tokens : muon", "PL576"),
        ("root : adamw\n lm_head : muon", "PL576"),
        ("root : adamw\n model.layers.*.mlp.up_proj : muon(per = part)", "PL577"),
        ("root : adamw\n model.layers.*.mlp.up_proj : muon(parts = [1, 2])", "PL577"),
        ("root : adamw\n model.norm : muon", "PL579"),
        ("root : adamw\n * : adamw(lr = 0.5)\n model.norm : sgd\n model.norm : adamw", "PL102"),
        ("root : adam", "PL105"),
        ("root : adamw(lr = -1)", "PL012"),
        ("root : adamw(state = fp16)", "PL012"),
        ("root : adamw(state = int8, block = 4096)", "PL590"),
        ("root : adamw(block = 64)", "PL012"),
        ("root : adamw(state = int8, block = 0)", "PL012"),
        ("root : adafactor(state = int8)", "PL012"),
        ("root : adamw(offload = cpu)", "PL012"),
        ("root : adafactor(d = 0.5)", "PL012"),
        ("root : adafactor(beta2_decay = 0.8)", "PL012"),
    ],
)
def test_findings(rules, code, tmp_path):
    text = f'plan t for llama\nextend "llama.plan"\noptimizer {{\n {rules}\n}}\n'
    sink = Sink()
    path, settings = str(written(tmp_path, text)), ["tp=8"]
    compile_plan("llama-3.1-8b", path, sink, world_size=8, settings=settings)
    assert code in codes(sink)


UNSPLIT = """
plan t for {family}
mesh {{ dp_shard = auto }}
optimizer {{
    root : adamw
    {rule}
}}
fsdp on dp_shard {{
    {blocks} : unit
    root : unit
}}
"""


def found_of(model, family, blocks, rule, tmp_path):
    sink = Sink()
    text = UNSPLIT.format(family=family, blocks=blocks, rule=rule)
    compile_plan(model, str(written(tmp_path, text)), sink, world_size=8)
    return list(sink)


@pytest.mark.parametrize(
    ("model", "family", "rule", "cut"),
    [
        ("gpt2", "gpt2", "transformer.h.*.attn.c_attn : muon(per = head)", (1, (64,) * 36)),
        ("gpt2", "gpt2", "transformer.h.*.attn.c_attn : muon(parts = 3)", (1, (768,) * 3)),
        ("phi-4", "phi3", "model.layers.*.mlp.gate_up_proj : muon(parts = 2)", (0, (17920,) * 2)),
        (
            "llama-4-scout",
            "llama4_text",
            "model.layers.*.feed_forward.experts : muon(parts = 2)",
            (2, (8192,) * 2),
        ),
        (
            "qwen3-30b-a3b",
            "qwen3_moe",
            "model.layers.*.mlp.experts : muon(parts = 2)",
            (1, (768,) * 2),
        ),
        (
            "gpt-oss-20b",
            "gpt_oss",
            "model.layers.*.mlp.experts : muon(parts = 2, interleaved = true)",
            (2, (2880,) * 2),
        ),
    ],
)
def test_units_are_of_the_outputs(model, family, rule, cut, tmp_path):
    """Which are the columns of a Conv1D, and of experts whose weights are [experts, in, out]."""
    blocks = rule.split("*")[0] + "*"
    text = UNSPLIT.format(family=family, blocks=blocks, rule=rule)
    ops = compiled_of(model, written(tmp_path, text)).lowered.ops
    [muon] = {op.algorithm for op in ops if isinstance(op, Optimize) and "muon" in op.headline()}
    [(_, found)] = [unit for unit in muon.units if unit[0] in ("weight", "gate_up_proj")]
    assert all(cut.sizes == () for name, cut in muon.units if name == "down_proj")
    assert (found.dim, found.sizes) == cut
    assert found.interleaved is ("interleaved" in rule)


@pytest.mark.parametrize(
    ("model", "family", "rule", "how"),
    [
        ("gpt-oss-20b", "gpt_oss", "model.layers.*.mlp.experts : muon(parts = 2)", "every n-th"),
        (
            "phi-4",
            "phi3",
            "model.layers.*.mlp.gate_up_proj : muon(parts = 2, interleaved = true)",
            "ranges",
        ),
    ],
)
def test_parts_are_those_that_the_models_code_takes(model, family, rule, how, tmp_path):
    [finding] = found_of(model, family, rule.split("*")[0] + "*", rule, tmp_path)
    assert finding.code == "PL577"
    assert f"the model's code takes {how} of its features: " in finding.message
    assert ("interleaved = true" in finding.help) is (how == "every n-th")


def test_the_tensor_rule_says_that_parts_alternate(tmp_path):
    text = 'plan t for gpt_oss\nextend "gpt_oss.plan"\noptimizer {\n root : adamw\n'
    path = written(tmp_path, text + " $blocks.mlp.experts : muon\n}\n")
    ops = compiled_of("gpt-oss-20b", path).lowered.ops
    [muon] = {o.algorithm for o in ops if isinstance(o, Optimize) and "alternate" in o.headline()}
    cuts = {name: (cut.sizes, cut.interleaved) for name, cut in muon.units}
    assert cuts == {"gate_up_proj": ((2880, 2880), True), "down_proj": ((), False)}


@pytest.mark.parametrize(("shape", "dim"), [((12, 5), 0), ((3, 4, 10), 2)])
def test_parts_that_alternate_step_as_parameters_of_their_own(shape, dim):
    torch.manual_seed(0)
    whole = torch.nn.ParameterDict({"both": torch.randn(shape)})
    index = [(..., slice(i, None, 2)) if dim else slice(i, None, 2) for i in range(2)]
    apart = torch.nn.ParameterDict({f"p{i}": whole["both"][at] for i, at in enumerate(index)})
    muon = {"momentum": 0.9, "nesterov": True, "ns_steps": 5, "adjust_lr": "original"}
    muon |= {"algorithm": "muon", "compute": None}
    cut = dim, (shape[dim] // 2,) * 2, True
    optimizers = [_planned(whole, **muon, units={"both": cut})]
    optimizers.append(_planned(apart, **muon, units={"p0": (), "p1": ()}))
    for _ in range(3):
        whole["both"].grad = torch.randn(shape)
        for i, at in enumerate(index):
            apart[f"p{i}"].grad = whole["both"].grad[at].clone()
        for optimizer in optimizers:
            optimizer.step()
    for i, at in enumerate(index):
        torch.testing.assert_close(whole["both"][at], apart[f"p{i}"])


@pytest.mark.parametrize("per", ["expert", "matrix"])
def test_an_expert_is_one_matrix_where_the_plan_says_so(per, tmp_path):
    """Although a tensor rule has parts of its weight."""
    text = 'plan t for qwen3_moe\nextend "qwen3_moe.plan"\noptimizer {\n root : adamw\n'
    text += f" model.layers.*.mlp.experts : muon(per = {per})\n}}\n"
    ops = compiled_of("qwen3-30b-a3b", written(tmp_path, text)).lowered.ops
    every = [op.algorithm for op in ops if isinstance(op, Optimize) and "muon" in op.headline()]
    units = [muon.units for muon in every]
    assert units
    assert all(cut.sizes == () for some in units for _, cut in some)


GATE_UP = "experts.gate_up_proj"


def steps_and_findings(model, family, rules, tmp_path, settings=(), shipped=False):
    """The units of Muon by the names of weights, and the findings."""
    text = UNSPLIT.format(family=family, blocks="$blocks", rule=rules)
    if shipped:
        text = f'plan t for {family}\nextend "{family}.plan"\noptimizer {{\n{rules}\n}}\n'
    sink = Sink()
    path = str(written(tmp_path, text))
    found = compile_plan(model, path, sink, world_size=8, settings=settings)
    ops = found.lowered.ops if found.lowered else ()
    muon = (op for op in ops if isinstance(op, Optimize) and "muon" in op.headline())
    units = {
        f"{op.modules.path[-1]}.{name}": (cut.dim, cut.sizes, cut.interleaved)
        for op in muon
        for name, cut in op.algorithm.units
    }
    return units, [d for d in sink if d.severity == "error"]


@pytest.mark.parametrize(
    ("model", "family", "blocks", "expected"),
    [
        ("phi-4", "phi3", "model.layers", {"self_attn.qkv_proj": 3}),
        ("gpt2", "gpt2", "transformer.h", {"attn.c_attn": 3}),
        ("starcoder", "gpt_bigcode", "transformer.h", {"attn.c_attn": 3}),
        ("falcon-7b", "falcon", "transformer.h", {"self_attention.query_key_value": 3}),
        ("bloom-7b1", "bloom", "transformer.h", {"self_attention.query_key_value": 3}),
        ("pythia-6.9b", "gpt_neox", "gpt_neox.layers", {"attention.query_key_value": 3}),
        ("deepseek-v3", "deepseek_v3", "model.layers", {"self_attn.kv_a_proj_with_mqa": 2}),
        ("jamba-v0.1", "jamba", "model.layers", {"mamba.x_proj": 3}),
    ],
)
def test_fused_weights_whose_parts_the_code_does_not_decide(
    model, family, blocks, expected, tmp_path
):
    """Whatever their names are: sizes of parts that are equal in the small model are not sizes of
    the real one, and the parts of each head are no ranges of rows.
    """
    rule = f"{blocks}.* : muon"
    fused = [d for d in found_of(model, family, f"{blocks}.*", rule, tmp_path) if d.code == "PL578"]
    said = {d.message.partition(" projections")[0] for d in fused}
    names = {text.partition("].")[2].replace(".weight", "").replace("`", "") for text in said}
    assert names == {f"{name} is {parts}" for name, parts in expected.items()}
    assert all(d.severity == "error" and ".py:" in d.facts[0] for d in fused)
    assert all("parts = [" in d.help or "per = head" in d.help for d in fused)


@pytest.mark.parametrize(
    ("model", "family", "where", "expected"),
    [
        ("phi-4", "phi3", "mlp", {"gate_up_proj.weight": (0, (17920,) * 2, False)}),
        ("mpt-7b", "mpt", "attn", {"Wqkv.weight": (0, (4096,) * 3, False)}),
        ("qwen3-30b-a3b", "qwen3_moe", "mlp.experts", {GATE_UP: (1, (768,) * 2, False)}),
        ("llama-4-scout", "llama4_text", "$experts", {GATE_UP: (2, (8192,) * 2, False)}),
        ("gpt-oss-20b", "gpt_oss", "$experts", {GATE_UP: (2, (2880,) * 2, True)}),
        ("llama-3.1-8b", "llama", "mlp", {}),
    ],
)
def test_fused_weights_are_cut_as_the_models_code_cuts_them(
    model, family, where, expected, tmp_path
):
    """Whatever the mesh is: no tensor rule says it here."""
    rule = f"{where if '$' in where else f'$blocks.{where}'} : muon"
    units, errors = steps_and_findings(model, family, rule, tmp_path)
    assert (errors, {n: cut for n, cut in units.items() if cut[1]}) == ([], expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_units_do_not_depend_on_the_mesh(family, tmp_path):
    """Gate and up were one matrix where no tensor axis had a rule for them."""
    model = {"mixtral": "mixtral-8x7b", "qwen3_moe": "qwen3-30b-a3b"}[family]
    rules = "root : adamw\n $experts : muon"
    found = [
        steps_and_findings(model, family, rules, tmp_path, settings, shipped=True)
        for settings in ([], ["ep=2"], ["tp=2"], ["ep=2", "tp=2", "etp=2"])
    ]
    first, *others = found
    assert len(first[0]["experts.gate_up_proj"][1]) == 2
    assert first[1] == []
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("rule", "code", "said"),
    [
        ("gate_up_proj : muon(parts = [11920, 23920])", "PL577", "parts of equal sizes"),
        ("gate_up_proj : muon(parts = 4)", "PL577", "takes 2 parts"),
        ("down_proj : muon(parts = 2)", "PL577", "does not cut its outputs"),
        ("gate_up_proj : muon(parts = [11920, 23920], anyway = true)", None, ""),
        ("gate_up_proj : muon(parts = [17920, 17920])", None, ""),
        ("gate_up_proj : muon(per = matrix)", None, ""),
        ("gate_up_proj : muon(per = part)", None, ""),
        ("down_proj : muon(per = part)", "PL577", "does not cut its outputs"),
    ],
)
def test_parts_are_those_of_the_code_or_of_no_weight(rule, code, said, tmp_path):
    rules = f"root : adamw\n model.layers.*.mlp.{rule}"
    _, errors = steps_and_findings("phi-4", "phi3", rules, tmp_path, ["tp=2"], shipped=True)
    assert [d.code for d in errors] == ([code] if code else [])
    assert all(said in d.message for d in errors)


def test_a_tensor_rule_with_other_parts_is_named(tmp_path):
    """q, k and v have other sizes than the code's small model can tell."""
    text = """
plan t for phi3
extend "phi3.plan"
tensor on tp {
    override $blocks.self_attn.qkv_proj : colwise(parts = [5120, 1280, 1280])
}
optimizer {
    root                        : adamw
    $blocks.self_attn.qkv_proj : muon(parts = [1280, 1280, 5120])
}
"""
    path, sink = written(tmp_path, text), Sink()
    compile_plan("phi-4", str(path), sink, world_size=8, settings=["tp=2"])
    [found] = [d for d in sink if d.code == "PL533"]
    assert [label.text for label in found.labels] == [
        "",
        "states 3 parts of 5,120, 1,280 and 1,280",
    ]
    path.write_text(text.lstrip().replace("[1280, 1280, 5120]", "[5120, 1280, 1280]"))
    compile_plan("phi-4", str(path), sink := Sink(), world_size=8, settings=["tp=2"])
    assert "PL533" not in codes(sink)


@pytest.mark.parametrize("rule", ["lm_head", "model.embed_tokens"])
def test_muon_steps_what_it_is_not_made_for_if_the_plan_says_so(rule, tmp_path):
    rules = f"root : adamw\n {rule} : muon(anyway = true)"
    units, errors = steps_and_findings("llama-3.1-8b", "llama", rules, tmp_path, shipped=True)
    assert (errors, [*units]) == ([], [f"{rule.rpartition('.')[2]}.weight"])


@pytest.mark.parametrize(
    ("model", "family", "blocks", "rule", "expected"),
    [
        (
            "jamba-v0.1",
            "jamba",
            "model.layers.*",
            "model.layers.*.mamba : muon(per = matrix)",
            "mamba.A_log is no factor of a product",
        ),
        (
            "llava-1.5-7b",
            "llava",
            "model.language_model.layers.*",
            "lm_head : muon",
            "lm_head.weight is the head",
        ),
        (
            "gpt-oss-20b",
            "gpt_oss",
            "model.layers.*",
            "model.layers.*.mlp : muon(per = matrix)",
            "model.layers[0:24].mlp.router.weight is a router",
        ),
    ],
)
def test_what_is_no_matrix_is_said_once(model, family, blocks, rule, expected, tmp_path):
    [found] = found_of(model, family, blocks, rule, tmp_path)
    assert found.code == "PL576"
    assert expected in found.message.replace("`", "")


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ("root : adamw\n lm_head : sgd", ["PL102"]),
        (
            "model.embed_tokens : adamw\n lm_head : sgd\n model.layers.* : adamw\n"
            " model.norm : adamw",
            ["PL102"],
        ),
        ("root : adamw\n model.embed_tokens : adamw(lr = 2)", []),
        ("root : adamw\n lm_head : adamw(lr = 2)\n model.embed_tokens : adamw(lr = 2)", []),
    ],
)
def test_a_tied_weight_has_one_rule(rules, found, tmp_path):
    """It was stepped by the rule of its first name, whatever another one said of the other."""
    text = f'plan t for llama\nextend "llama.plan"\noptimizer {{\n {rules}\n}}\n'
    path, sink = written(tmp_path, text), Sink()
    compile_plan("llama-3.2-1b", str(path), sink, world_size=8)
    assert codes(sink) == found


def test_biases_that_nothing_steps_are_named(tmp_path):
    rules = "$embedding : adamw\n $head : adamw\n $final_norm : adamw\n"
    rules += " model.layers.*.*layernorm : adamw\n model.layers.*.{self_attn,mlp} : muon"
    text = f'plan t for llama\nextend "llama.plan"\noptimizer {{\n {rules}\n}}\n'
    path, sink = written(tmp_path, text), Sink()
    compile_plan("qwen2.5-7b", str(path), sink, world_size=8)
    [found] = [d.message for d in sink if d.code == "PL575"]
    assert "`model.layers[0:28].self_attn.{q,k,v}_proj.bias`" in found


def test_a_router_is_no_matrix(tmp_path):
    """The last block, a unit of its own, is named with the others."""
    text = 'plan t for qwen3_moe\nextend "qwen3_moe.plan"\noptimizer {\n root : adamw\n'
    path, sink = written(tmp_path, text + " model.layers.* : muon\n}\n"), Sink()
    compile_plan("qwen3-30b-a3b", str(path), sink, world_size=8)
    found = [d.message for d in sink if d.code == "PL576"]
    assert found == ["`model.layers[0:48].mlp.gate.weight` is a router, which Muon is not made for"]


@pytest.mark.parametrize(
    "rule",
    [
        "mlp.down_proj : muon(per = part)",
        "mlp.down_proj : muon(per = head)",
        "mlp.down_proj : muon(per = expert)",
        "self_attn.o_proj : muon(per = head)",
    ],
)
def test_units_that_do_not_fit_are_said_once(rule, tmp_path):
    """The columns of an output projection are of heads, and its rows are not."""
    text = 'plan t for llama\nextend "llama.plan"\noptimizer {\n root : adamw\n'
    rule = f" model.layers.*.{rule}\n}}\n"
    path, sink = written(tmp_path, text + rule), Sink()
    compile_plan("llama-3.1-8b", str(path), sink, world_size=8)
    assert codes(sink) == ["PL577"]


def _planned(module, **terms):
    usual = {"lr": 1.0, "weight_decay": 1.0, "state": None}
    optimize(module, **{**usual, **terms})
    return planned_optimizer(module, 0.02, 0.1)


def _trained(make, module):
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    optimizer = make(module)
    for _ in range(4):
        module(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("state", [None, torch.bfloat16])
def test_adamw_is_torchs(state):
    module = torch.nn.Linear(12, 5)
    terms = {"algorithm": "adamw", "betas": (0.8, 0.99), "eps": 1e-7, "state": state}
    mine = _trained(lambda m: _planned(m, **terms), module)
    right = _trained(
        lambda m: torch.optim.AdamW(
            m.parameters(), lr=0.02, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-7
        ),
        module,
    )
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3 if state else 0)


def test_sgd_is_torchs():
    module = torch.nn.Linear(12, 5)
    terms = {"algorithm": "sgd", "momentum": 0.9, "nesterov": True}
    mine = _trained(lambda m: _planned(m, **terms), module)
    right = _trained(
        lambda m: torch.optim.SGD(
            m.parameters(), lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=True
        ),
        module,
    )
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


def test_adafactor_is_torchs():
    module = torch.nn.Linear(12, 5)
    terms = {"beta2_decay": -0.7, "eps1": None, "eps2": 1e-3, "d": 1.5}
    mine = _trained(lambda m: _planned(m, algorithm="adafactor", **terms), module)
    right = _trained(
        lambda m: torch.optim.Adafactor(
            m.parameters(), lr=0.02, weight_decay=0.1, beta2_decay=-0.7, d=1.5
        ),
        module,
    )
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_torchs(adjust, monkeypatch):
    """torch computes the iteration in bfloat16; here both do."""
    module = torch.nn.Linear(12, 5, bias=False)
    terms = {
        "algorithm": "muon",
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "adjust_lr": adjust,
        "compute": torch.bfloat16,
        "units": {"weight": ()},
    }
    mine = _trained(lambda m: _planned(m, **terms), module)
    right = _trained(
        lambda m: torch.optim.Muon(
            m.parameters(), lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust
        ),
        module,
    )
    torch.testing.assert_close(mine[0], right[0], rtol=0, atol=1e-3)


def test_a_parameter_in_no_group_raises():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimize(module[0], "sgd", lr=1.0, weight_decay=1.0, state=None, momentum=0.0, nesterov=False)
    with pytest.raises(ValueError, match=r"does not step 1\.weight"):
        planned_optimizer(module, 0.1)


def test_a_frozen_parameter_needs_no_group():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].requires_grad_(False)
    optimize(module[0], "sgd", lr=1.0, weight_decay=1.0, state=None, momentum=0.0, nesterov=False)
    [group] = planned_optimizer(module, 0.1).param_groups
    assert group["params"] == [*module[0].parameters()]


def test_it_is_a_torch_optimizer():
    module = torch.nn.Linear(12, 5)
    made = _planned(module, algorithm="sgd", momentum=0.9, nesterov=False)
    assert isinstance(made, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5**step)
    module(torch.randn(3, 12)).sum().backward()
    made.step()
    schedule.step()
    assert isinstance(made, PlannedOptimizer)
    assert made.param_groups[0]["lr"] == 0.01
    again = planned_optimizer(module, 0.02, 0.1)
    again.load_state_dict(made.state_dict())
    assert again.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("given", "lr", "planned", "said"),
    [
        (True, None, True, "the script brings one of its own"),
        (True, 0.1, True, "the script brings one of its own"),
        (False, None, True, "no learning rate is given"),
        (False, 0.1, False, "the plan has no optimizer section"),
    ],
)
def test_the_plan_or_the_script_has_the_optimizer(given, lr, planned, said):
    own = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) if given else None
    with pytest.raises(PlanError, match="PL580") as caught:
        required_rate(own, lr, planned=planned)
    assert said in str(caught.value)
