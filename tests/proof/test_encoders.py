"""Encoders of images, sound or text, which return hidden states: `init`, proofs, the loss."""

import json

import pytest
import torch
from helpers import slow
from transformers import AutoConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values
from planc.proof.layout_flow import flow
from planc.proxy.output_loss import loss_and_output
from planc.tools.init.init import draft

ENCODERS = [
    # (model_type, class, rules that its plan has, whether sequence parallelism is proved)
    ("vit", "ViTModel", ["attention.{q,k,v}_proj:colwise", "mlp.fc2:rowwise"], False),
    ("modernbert", "ModernBertModel", ["attn.Wqkv:colwise(parts=3)", "attn.Wo:rowwise"], True),
]
SLOW = [
    ("bert", "BertModel", ["attention.self.{query,key,value}:colwise"], True),
    ("dinov2", "Dinov2Model", ["mlp.fc1:colwise"], False),
    ("wav2vec2", "Wav2Vec2Model", ["attention.{q,k,v}_proj:colwise"], False),
    ("clip_vision_model", "CLIPVisionModel", ["self_attn.{q,k,v}_proj:colwise"], False),
    ("siglip_vision_model", "SiglipVisionModel", ["self_attn.{q,k,v}_proj:colwise"], False),
    ("siglip", "SiglipModel", ["self_attn.{q,k,v}_proj:colwise"], True),
    ("clip", "CLIPModel", ["self_attn.{q,k,v}_proj:colwise"], True),
    ("hubert", "HubertModel", ["attention.{q,k,v}_proj:colwise"], False),
    ("whisper", "WhisperEncoder", ["self_attn.{q,k,v}_proj:colwise", "num_heads=split"], False),
    ("vit", "ViTForImageClassification", ["attention.{q,k,v}_proj:colwise"], False),
]


def facts_of(family, cls):
    values = json.loads(json.dumps(AutoConfig.for_model(family).to_dict(), default=str))
    sink = Sink()
    facts = load_values({**values, "architectures": [cls]}, "config.json", sink)
    assert facts is not None and facts.name == cls, [d.message for d in sink]
    return facts


@pytest.mark.parametrize(
    ("family", "cls", "rules", "sequence"),
    [*ENCODERS, *(slow(*case) for case in SLOW)],
    ids=lambda value: value if isinstance(value, str) and value[0].isupper() else "",
)
def test_an_encoder_gets_tensor_parallelism_and_is_proved(tmp_path, family, cls, rules, sequence):
    facts, sink = facts_of(family, cls), Sink()
    made = draft(facts, sink)
    assert not list(sink) and made.outcome.verdict == "proved" and made.sequence is sequence
    text = "".join(made.text.split())
    assert all(rule in text for rule in rules), made.text
    settings = ["tp=2", *(["sequence=false"] if sequence else [])]
    path = tmp_path / "made.plan"
    stated = made.text.replace("\ntensor on tp {", "\noverride tensor on tp {")
    assert stated != made.text
    for content, verdict in (
        (made.text, "proved"),
        (stated, "proved"),
        (broken(stated), "refuted"),
    ):
        path.write_text(content)
        own = settings if content is made.text else ["tp=2"]
        compiled = compile_plan(facts, str(path), sink, world_size=4, settings=own)
        assert compiled.lowered is not None, [d.message for d in sink]
        assert flow(compiled, sink).verdict == verdict
    path.write_text(broken(made.text))  # beside inference, no run is needed
    compile_plan(facts, str(path), sink := Sink(), world_size=4, settings=["tp=2"])
    assert [d.code for d in sink if d.severity == "error"] == ["PL505"]


def broken(text):
    """The plan without the sum of the partial outputs of its MLPs."""
    lines = text.splitlines()
    at = max(i for i, line in enumerate(lines) if ": rowwise" in line and "embed" not in line)
    lines[at] = f"{lines[at].partition(':')[0]}: rowwise(-> partial)"
    return "\n".join(lines)


def test_a_model_that_a_script_built_is_proved_too(tmp_path):
    """Of a part of a model, only the family's own module has the class."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = dict(d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128)
    with torch.device("meta"):
        model = WhisperEncoder(WhisperConfig(**sizes))
    path = tmp_path / "own.plan"
    path.write_text(
        "plan own for whisper\nmesh {\n dp_shard = auto\n tp = 2\n}\n"
        "tensor on tp {\n layers.*.fc1 : colwise\n layers.*.fc2 : rowwise\n}\n"
        "fsdp on dp_shard {\n layers.* : unit\n root : unit\n}\n"
    )
    assert {d.severity for d in planc.check(model, str(path), world_size=4)} <= {"info"}


def test_masks_that_numpy_draws_are_told(tmp_path):
    facts = facts_of("wav2vec2", "Wav2Vec2Model")
    path = tmp_path / "own.plan"
    path.write_text(
        "plan own for wav2vec2\nmesh {\n tp = 2\n}\ntensor on tp {\n"
        " encoder.layers.*.feed_forward.intermediate_dense : colwise\n"
        " encoder.layers.*.feed_forward.output_dense : rowwise\n}\n"
    )
    sink = Sink()
    compile_plan(facts, str(path), sink, world_size=2)
    [found] = [d for d in sink if d.code == "PL670"]
    assert "SpecAugment masks come from numpy (mask_time_prob = 0.05)" in found.message
    assert "the script must give numpy the same seed on all ranks of tp" in found.facts


def test_the_loss_of_an_output_has_gradients_behind_a_norm_and_is_a_mean_over_rows():
    states = torch.randn(4, 3, 8, requires_grad=True)
    normed = torch.nn.functional.layer_norm(states, (8,))
    made = loss_and_output(BaseModelOutputWithPooling(normed, pooler_output=normed[:, 0]))
    made.loss.backward()
    assert made.logits is normed and states.grad.abs().mean() > 1e-3
    halves = [loss_and_output((normed[i : i + 2], {"a": [normed[i : i + 2, 0]]})) for i in (0, 2)]
    assert torch.allclose(sum(h.loss for h in halves) / 2, made.loss)
    assert loss_and_output((torch.ones(2, dtype=torch.long),)).loss is None


def test_a_scalar_gets_one_element_before_fsdp_shards_it(tmp_path):
    """CLIP's `logit_scale`; Megatron-FSDP would raise, at the line of its unit."""
    facts = facts_of("clip", "CLIPModel")
    path = tmp_path / "clip.plan"
    path.write_text(
        "plan clip for clip\n\nmesh {\n    dp_shard = auto\n}\n\nfsdp on dp_shard {\n"
        "    vision_model : unit\n    root : unit\n}\n"
    )
    sink = Sink()
    inner, root = compile_plan(facts, str(path), sink, world_size=2).lowered.ops
    assert not sink.errors and root.scalars and not inner.scalars
    path.write_text(path.read_text().replace("    vis", "    backend = megatron\n    vis"))
    sink = Sink()
    compile_plan(facts, str(path), sink, world_size=2)
    [found] = [d for d in sink if d.severity == "error"]
    assert found.code == "PL443" and "`logit_scale`" in found.message
    assert found.labels[0].span.line == 10
    sink = Sink()
    compile_plan(facts, str(path), sink, world_size=1)
    assert not sink.errors
