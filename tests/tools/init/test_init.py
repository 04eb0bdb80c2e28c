"""`planc init`: plans as one would write them, proved as they are written.

What transformers' families come to, on real processes, is in `make coverage`; ten of them are in
tests/coverage/test_coverage.py.
"""

import importlib
import json
import tempfile
import textwrap
from collections import Counter

import family_rows
import pytest
import transformers
from folders import ROOT
from helpers import slow
from records import table
from transformers import BltConfig, Inkling2TextConfig

import planc
from planc.cli import main
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.elaborate.sections.tensor_styles import split_of_transformers
from planc.model.load import load, load_values
from planc.ops.styles import style_text
from planc.ops.tensor_parallel import Parallelize
from planc.proof.layout_flow import flow
from planc.proof.small_case import small_model
from planc.proxy.record_flow import record
from planc.syntax.formatter.layout import format_plan
from planc.tools.init.from_transformers import tp_plan
from planc.tools.init.init import draft
from planc.tools.init.plan_text import brace_names
from planc.tools.init.roles import roles

NANO = textwrap.dedent(
    """
    import torch
    from torch import nn
    from torch.nn import functional as F


    class Attention(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.c_attn = nn.Linear(width, 3 * width)
            self.c_proj = nn.Linear(width, width)
            self.heads, self.width = heads, width

        def forward(self, x):
            b, t, c = x.size()
            parts = self.c_attn(x).split(self.width, dim=2)
            q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


    class Mlp(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.c_fc = nn.Linear(width, 4 * width)
            self.c_proj = nn.Linear(4 * width, width)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x):
            return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn, self.mlp = Attention(width, heads), Mlp(width)

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))


    class GPT(nn.Module):
        def __init__(self, vocabulary=256, length=64, layers=2, heads=4, width=64):
            super().__init__()
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(vocabulary, width),
                    wpe=nn.Embedding(length, width),
                    h=nn.ModuleList([Block(width, heads) for _ in range(layers)]),
                    ln_f=nn.LayerNorm(width),
                )
            )
            self.lm_head = nn.Linear(width, vocabulary, bias=False)
            self.transformer.wte.weight = self.lm_head.weight

        def forward(self, idx, targets=None):
            t = self.transformer
            x = t.wte(idx) + t.wpe(torch.arange(idx.size(1), device=idx.device))
            for block in t.h:
                x = block(x)
            logits = self.lm_head(t.ln_f(x))
            if targets is None:
                return logits, None
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


    class Silent(nn.Sequential):
        def forward(self, ids):
            return "neither loss nor logits"


    def no_loss():
        return Silent(nn.Embedding(64, 32), nn.Linear(32, 64))
    """
)


def drafted(model):
    sink = Sink()
    facts = model if not isinstance(model, str) else load(model, sink)
    assert facts is not None, [d.message for d in sink]
    return facts, draft(facts, sink), sink


def rules(text):
    """The rules of the tensor section, without blanks."""
    section = text.partition("tensor on tp {")[2].partition("\n}\n")[0]
    return ["".join(line.split()) for line in section.splitlines() if ":" in line]


@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", slow("qwen3-8b"), slow("mixtral-8x7b"), slow("phi-4")]
)
def test_a_drafted_plan_is_laid_out_checked_and_proved(model, tmp_path):
    facts, made, found = drafted(model)
    assert list(found) == []
    assert made.outcome.verdict == "proved" and made.sequence
    assert format_plan(Source("draft.plan", made.text), Sink()) == made.text
    path = tmp_path / "draft.plan"
    path.write_text(made.text)
    for way in ("true", "false"):
        sink, settings = Sink(), ["tp=2", f"sequence={way}"]
        compiled = compile_plan(facts, str(path), sink, world_size=16, settings=settings)
        assert compiled.lowered is not None, [d.message for d in sink]
        assert flow(compiled, sink).verdict == "proved"
        assert {d.code for d in sink} <= {"PL204"}, [d.message for d in sink]


def test_drafting_reads_and_writes_no_plan(monkeypatch):
    from planc.syntax import plan_files

    monkeypatch.setattr(plan_files, "read", lambda *_: pytest.fail("a plan was read"))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *_, **__: pytest.fail("a folder was made"))
    _, made, _ = drafted("llama-3.2-1b")
    assert made.outcome.verdict == "proved"


def test_what_it_writes_is_what_one_would_write(tmp_path):
    facts, made, _ = drafted("llama-3.1-8b")
    assert rules(made.text) == [
        "self_attn.{q,k,v}_proj:colwise",
        "mlp.{gate,up}_proj:colwise",
        "self_attn.o_proj:rowwise",
        "mlp.down_proj:rowwise",
    ]
    assert 'extend "decoder.plan"' in made.text  # the embedding, the head and `sequence`
    assert "->" not in made.text and "sequence" not in made.text  # layouts are inferred
    (tmp_path / "draft.plan").write_text(made.text)
    compiled = compile_plan(facts, str(tmp_path / "draft.plan"), Sink(), settings=["tp=2"])
    ops = [op for op in compiled.lowered.ops if isinstance(op, Parallelize)]
    styles = {str(op.modules): style_text(op.style) for op in ops}
    assert styles["model.embed_tokens"] == "rowwise(replicate -> shard(1), local = false)"
    assert styles["lm_head"] == "colwise(shard(1) -> replicate)"
    assert made.runs == 3  # the first guess holds: alone, checkpointed, and with the sequence split


def test_a_gradient_that_nothing_sums_needs_no_rule(tmp_path):
    facts, made, _ = drafted("qwen3-8b")
    assert "_norm" not in made.text and made.outcome.verdict == "proved"
    (tmp_path / "draft.plan").write_text(made.text)
    done = compile_plan(facts, str(tmp_path / "draft.plan"), Sink(), settings=["tp=2"])
    ops = [op for op in done.lowered.ops if isinstance(op, Parallelize)]
    [norms] = {style_text(op.style) for op in ops if "q_norm" in str(op.modules)}
    assert norms == "sequence(dim = 2, local = true)"


def test_experts_and_fused_weights_are_split_in_their_parts():
    _, mixtral, _ = drafted("mixtral-8x7b")
    wanted = "mlp.experts:experts(gate_up_proj=shard(1,parts=2),down_proj=shard(2))"
    assert wanted in rules(mixtral.text)
    _, phi, _ = drafted("phi-4")
    assert "mlp.gate_up_proj:colwise(parts=2)" in rules(phi.text)


def test_what_its_code_does_not_bear_is_taken_back():
    """Phi's attention cuts its output by its configuration's heads; gathered, it is proved."""
    _, made, _ = drafted("phi-4")
    assert "self_attn.qkv_proj:colwise(->replicate)" in rules(made.text)
    assert "# the outputs are gathered" in made.text and "modeling_phi3.py:" in made.text
    assert made.runs > 1 and made.outcome.verdict == "proved"


def given(model):
    facts = load(model, Sink())
    return draft(facts, Sink(), None, tp_plan(facts))


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("qwen3-8b", {"self_attn.{q,k,v}_proj:colwise", "$head:colwise(->replicate)"}),
        (
            "mixtral-8x7b",
            {"mlp.experts:experts(gate_up_proj=shard(1,parts=2),down_proj=shard(2))"},
        ),
        ("phi-4", {"self_attn.qkv_proj:colwise(->replicate)", "self_attn.o_proj:rowwise"}),
    ],
)
def test_transformers_own_plan_is_read_as_splits_and_proved(model, wanted):
    made = given(model)
    assert wanted <= {*rules(made.text)}, made.text
    assert made.outcome.verdict == "proved" and made.sequence
    assert "with the splits of transformers' own plan" in " ".join(made.text.split())


def test_styles_of_transformers_that_split_nothing_are_left_to_inference():
    splits = {
        "colwise": "colwise",
        "colwise_gather_output": "colwise(-> replicate)",
        "embedding_rowwise": "rowwise",
        "rowwise_split_input": "rowwise",
        "packed_colwise": "colwise(parts = 2)",
        "packed_rowwise": "rowwise(parts = 2)",
    }
    assert {name: split_of_transformers(name) for name in splits} == splits
    none = ("gather", "all_reduce", "replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate")
    assert not any(map(split_of_transformers, none))


REFUTED = {
    "beam", "doge", "dots3_note", "dots3_note_text", "gemma3n_text", "gemma4", "granite_swa",
    "granitemoe_swa", "hy_v4", "inkling_text", "laguna", "lfm2", "lfm3", "mimo_v2_flash",
}  # fmt: skip
"""Families that are wrong with transformers' own splits, or need more than inferred layouts."""


def in_part(made, facts, path):
    """Whether a plan has parts of the sequence in a part of the blocks alone."""
    path.write_text(made.text)
    settings = ["tp=2", "sequence=true"]
    compile_plan(facts, str(path), sink := Sink(), world_size=2, settings=settings)
    return any(d.code == "PL527" for d in sink)


DRAFTS = ROOT / "docs" / "generated" / "drafts.md"


def drafts_page(total, proved, everywhere, in_part):
    """The page of the drafts: numbers of families."""
    rows = {
        "can be built": total,
        "proved without sequence parallelism": proved,
        "proved with sequence parallelism everywhere": everywhere,
        "proved with it in some of the blocks": in_part,
        "not proved with its rules": total - proved,
    }
    head = f"""# Drafts from the plans of transformers

Written by `pytest tests/tools/init/test_init.py -k all_families --update`. The families are the
causal language models of transformers {transformers.__version__} with a `tp_plan` of their own, at
small sizes. Each is drafted by `planc init --from transformers` ([a first plan](../init.md)).

"""
    return head + table(["transformers' own plan", "families"], rows.items())


@pytest.mark.slow
def test_the_plans_of_all_families_of_transformers(tmp_path, request):
    found = Counter()
    for name in family_rows.types():
        try:
            facts, _, small = family_rows.models(name, Sink())
        except Exception:  # a default configuration that transformers itself refuses
            continue
        theirs = tp_plan(facts) if small is not None else {}
        if theirs:
            made = draft(facts, Sink(), None, theirs)
            assert (made.outcome.verdict == "proved") is (name not in REFUTED), name
            part = made.sequence and in_part(made, facts, tmp_path / "made.plan")
            found[made.outcome.verdict, made.sequence, part] += 1
    proved = Counter({k: n for k, n in found.items() if k[0] == "proved"})
    ways = (found["proved", True, False], found["proved", True, True])
    page = drafts_page(found.total(), proved.total(), *ways)
    if request.config.getoption("--update"):
        DRAFTS.write_text(page)
    assert page == DRAFTS.read_text()


def test_a_model_that_transformers_has_no_plan_for(capsys):
    assert main(["init", "gpt2", "--from", "transformers"]) == 2
    assert "PL581" in capsys.readouterr().err


def test_a_clash_takes_back_the_split_that_makes_it():
    """BLT's token embedding goes into a norm behind sums in place; all else stays split."""
    facts = load_values(BltConfig().to_dict(), "blt", Sink())
    _, made, _ = drafted(facts)
    found = rules(made.text)
    assert "model.local_encoder.embed_tokens:rowwise" not in found
    assert found.count("self_attn.o_proj:rowwise") == 4 and found.count("o_proj:rowwise") == 2
    assert found.count("mlp.{gate,up}_proj:colwise") == 4 and "lm_head:colwise" in found


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_setting_keeps_its_type_where_a_plan_sets_it_to_a_word(value, tmp_path):
    path = tmp_path / "own.plan"
    path.write_text(
        'plan own for llama\nextend "decoder.plan"\noverride option sequence = "auto"\n'
        "override tensor on tp {\n sequence = sequence\n $embedding : rowwise\n}\n"
    )
    sink, settings = Sink(), ["tp=2", f"sequence={value}"]
    compile_plan("llama-3.2-1b", str(path), sink, world_size=2, settings=settings)
    assert "PL106" not in {d.code for d in sink}


def test_dead_rules_of_transformers_are_named():
    values = {
        "model_type": "qwen2_moe",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    _, made, found = drafted(load_values(values, "config.json", Sink()))
    [finding] = [d for d in found if d.code == "PL661"]
    assert "`layers.*.mlp.gate_proj`" in finding.message
    assert "transformers' own plan also names" in " ".join(made.text.split())
    assert made.outcome.verdict == "proved"


def test_a_plan_of_the_family_that_splits_more_is_named():
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    values = {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], **sizes}
    _, made, found = drafted(load_values(values, "config.json", Sink()))
    [finding] = [d for d in found if d.code == "PL662"]
    assert "plans/gpt_bigcode.plan ships for gpt_bigcode, and splits 99.2%" in finding.message
    assert finding.message in " ".join(made.text.replace("#", "").split())


def test_what_stays_whole_is_told_with_the_reason():
    fields = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 128}
    attention = {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0}
    values = {"model_type": "dbrx", "architectures": ["DbrxForCausalLM"], **fields}
    facts = load_values({**values, "attn_config": attention}, "config.json", Sink())
    _, made, found = drafted(facts)
    [finding] = [d for d in found if d.code == "PL663"]
    assert finding.message.endswith("of the parameters stay whole on every rank of tp")
    [fact] = [f for f in finding.facts if f.startswith("transformer.blocks[0:2].ffn.experts.mlp (")]
    assert "DbrxExpertGLU has parameters of its own (w1 [" in fact
    assert "no style is known to split them" in " ".join(made.text.replace("#", "").split())


def test_a_model_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_nano.py").write_text(NANO)
    assert main(["init", "own_nano:GPT", "-o", "my.plan"]) == 2
    assert "--allow-code" in capsys.readouterr().err and not (tmp_path / "my.plan").exists()
    assert main(["init", "own_nano:GPT", "--allow-code", "-o", "my.plan"]) == 0
    text = (tmp_path / "my.plan").read_text()
    assert "mlp.c_fc:colwise" in rules(text)
    assert "attn.c_attn:colwise(->replicate)" in rules(text)  # it splits at the whole width
    assert 'extend "blocks.plan"' in text and "sequence" not in text  # that has the setting
    words = ["--allow-code", "--world-size", "4", "--set", "tp=2", "--format", "json"]
    capsys.readouterr()
    assert main(["check", "own_nano:GPT", "my.plan", *words]) == 0
    assert json.loads(capsys.readouterr().out)["flow"]["verdict"] == "proved"
    split = text.replace("attn.c_attn : colwise(-> replicate)", "attn.c_attn : colwise")
    assert split != text
    (tmp_path / "my.plan").write_text(split)
    assert main(["check", "own_nano:GPT", "my.plan", *words]) == 1
    assert json.loads(capsys.readouterr().out)["flow"]["verdict"] == "refuted"


def test_a_family_without_a_plan_is_checked_with_a_draft(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_nano.py").write_text(NANO)
    words = ["--allow-code", "--world-size", "4", "--set", "tp=2", "--format", "json"]
    assert main(["check", "own_nano:GPT", *words]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["flow"]["verdict"] == "proved"
    assert "the plan is <draft>" in said.err and "planc init own_nano:GPT" in said.err
    assert (
        main(
            ["check", "own_nano:GPT", *words[:1], "--world-size", "3", *words[3:], "--set", "tp=3"]
        )
        == 1
    )
    found = json.loads(capsys.readouterr().out)["diagnostics"]
    assert {label["file"] for d in found for label in d["labels"]} >= {"<draft>"}
    for command in (["lower"], ["check", "--level", "structure"]):
        assert main([*command, "own_nano:GPT", "--allow-code"]) == 2
        assert "PL022" in "".join(capsys.readouterr())


def test_a_module_without_a_plan_is_checked_with_a_draft(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_drafted.py").write_text(NANO)
    module = importlib.import_module("own_drafted").GPT()
    found = planc.check(module, world_size=4, overrides={"tp": 2})
    assert not [d for d in found if d.severity == "error"]
    assert "layout flow (proved" in str(found)
    with pytest.raises(planc.PlanError, match="PL022"):
        planc.lower(module, world_size=4)


NAMED_BLOCKS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = {f"block_{c}": nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for c in "ab"}
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x

    def planc_inputs(self, rows, seed):
        return {"x": torch.randn(rows, 8, 32)}
"""


def test_what_can_not_be_run_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_lossless.py").write_text(NANO)
    assert main(["init", "own_lossless:no_loss", "--allow-code"]) == 0
    said = capsys.readouterr()
    told = " ".join(said.err.split())
    assert "PL660" in told and "does not run: no module takes hidden states" in told
    assert "# Not proved:" in said.out


def test_blocks_with_names_are_no_list_and_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_named.py").write_text(NAMED_BLOCKS)
    assert main(["init", "own_named:Net", "--allow-code"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "could not be proved: no list of blocks: an nn.ModuleList, or" in told


def test_a_model_that_is_not_there(capsys):
    assert main(["init", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["mlp.gate_proj", "mlp.up_proj"], ["mlp.{gate,up}_proj"]),
        (["input_layernorm", "post_attention_layernorm"], ["{input,post_attention}_layernorm"]),
        (["mlp.fc1"], ["mlp.fc1"]),
        (["attn.q", "attn.k", "mlp.up"], ["attn.{q,k}", "mlp.up"]),
        (["ln_1", "ln_2"], ["{ln_1,ln_2}"]),
    ],
)
def test_names_that_are_alike_stand_in_braces(names, wanted):
    assert brace_names(names) == wanted


TOWERS = [
    # (the fields of the configuration, rules that the plan has, its kinds of blocks)
    (
        {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]},
        ["let tower = model.vision_tower.encoder.layers.*", "mlp.fc2 : rowwise"],
        ["model.vision_tower.encoder.layers[0:24]", "model.language_model.layers[0:32]", "root"],
    ),
    (
        {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
        ["let block = model.encoder.layers.*", "let block2 = model.decoder.layers.*"],
        ["model.encoder.layers[0:4]", "model.decoder.layers[0:4]", "root"],
    ),
]


@pytest.mark.parametrize(
    ("config", "lines", "kinds"),
    TOWERS,
    ids=["llava", "whisper"],
)
def test_towers_are_planned_under_their_own_names(tmp_path, config, lines, kinds):
    from transformers import AutoConfig

    values = AutoConfig.for_model(config["model_type"]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**values, **config}, default=str))
    sink = Sink()
    facts = load(str(tmp_path), sink)
    made = draft(facts, sink)
    text = " ".join(made.text.split())
    assert all(" ".join(line.split()) in text for line in lines), made.text
    assert "Replicated, because" not in made.text
    path = tmp_path / "made.plan"
    path.write_text(made.text)
    compiled = compile_plan(facts, str(path), sink, world_size=8, settings=["tp=2"])
    verdict = flow(compiled, sink)
    assert verdict.verdict == "proved"
    assert [(k.modules, k.verdict) for k in verdict.layers] == [(k, "proved") for k in kinds]
    units = [op for op in compiled.lowered.ops if type(op).__name__ == "FullyShard"]
    for list_of_blocks in kinds[:2]:
        path = list_of_blocks.partition("[")[0]
        assert any(str(m).startswith(path) for op in units for m in op.members), path


def test_a_small_model_runs_without_the_cache_that_its_configuration_cannot_make():
    """BLT's has no `num_hidden_layers`, which the cache of its inner models reads."""
    facts = load_values(BltConfig().to_dict(), "blt", Sink())
    found = record(small_model(facts).builder())
    assert "model.global_transformer.layers.0" in [call.name for call in found.calls]


def test_an_embedding_with_a_norm_inside_is_not_split(tmp_path):
    """torch's styles would register the norm's weight as the embedding's own, and raise."""
    facts = load_values(Inkling2TextConfig().to_dict(), "inkling2_text", Sink())
    (tmp_path / "t.plan").write_text(
        "plan t for inkling2_text\nmesh { tp = 2 }\ntensor on tp { model.embed_tokens : rowwise }\n"
    )
    sink = Sink()
    compile_plan(facts, str(tmp_path / "t.plan"), sink, world_size=2)
    [found] = [d for d in sink if d.severity == "error"]
    assert found.code == "PL150" and "`embed_norm` inside" in found.message


def test_a_list_of_embeddings():
    """musicgen has one for each codebook of sound."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "ffn_dim": 64, "num_attention_heads": 4}
    config = {"model_type": "musicgen_decoder", "architectures": ["MusicgenForCausalLM"]}
    found = load_values({**config, **sizes, "vocab_size": 64}, "musicgen", sink := Sink())
    assert found is not None, sink.diagnostics
    assert roles(found, None).embedding == "model.decoder.embed_tokens[0:4]"
