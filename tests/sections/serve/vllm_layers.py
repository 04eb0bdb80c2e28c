"""vLLM's own linear and vocabulary layers as the judge of all families of its page.

`python -W ignore vllm_layers.py FOLDER`, where `FOLDER/vllm` has the Python files of its wheel. The
files linear.py, vocab_parallel_embedding.py and parameter.py of its layers run as they are, on
stand-ins for what they import, so no extension and no GPU is needed. Each rank's layers load full
tensors by their `weight_loader`; the slices that planc derives must be equal. Experts are left out:
their loaders do not run without vLLM's extension.
"""

import importlib
import json
import re
import sys
import types
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import torch
from engine_classes import families_of
from tiny_engines import LLAMA, facts_of, files_of, fill, tiny_config
from torch import nn

from planc.compiler import compile, read
from planc.diagnostics.diagnostic import Sink
from planc.ir.engine_layout import EngineLayout
from planc.ir.serving import serving_of
from planc.model.config import integer_of
from planc.model.config_fields import HEADS, KV_HEADS

RANK = {"rank": 0, "size": 1}
BASE = "vllm.model_executor"
UNUSED = (
    "vllm.envs",
    "vllm.config",
    "vllm.logger",
    "vllm.platforms",
    "vllm._custom_ops",
    f"{BASE}.determinism",
    f"{BASE}.determinism.batch_invariant",
    f"{BASE}.layers.utils",
    f"{BASE}.layers.quantization.utils",
    f"{BASE}.layers.quantization.utils.fp8_utils",
)


class PluggableLayer(nn.Module):
    register = staticmethod(lambda name: lambda layer: layer)


def stand_in(root, name, path=None, **known):
    """A module of this name: of files in a folder, or of mocks."""
    module = types.ModuleType(name)
    module.__dict__.update(known)
    if path:
        module.__path__ = [str(root / path)]
    else:
        module.__getattr__ = lambda attribute: mock.MagicMock(name=f"{name}.{attribute}")
    sys.modules[name] = module


def divide(one, other):
    assert one % other == 0, f"{one} is not divisible by {other}"
    return one // other


def set_attributes(weight, weight_attrs):
    for name, value in (weight_attrs or {}).items():
        setattr(weight, name, value)


def install(root):
    """Puts stand-ins for all that the layers import into `sys.modules`."""
    stand_in(root, "vllm", "vllm")
    for name in (BASE, f"{BASE}.layers"):
        stand_in(root, name, name.replace(".", "/"))
    stand_in(
        root,
        "vllm.distributed",
        divide=divide,
        get_tensor_model_parallel_rank=lambda: RANK["rank"],
        get_tensor_model_parallel_world_size=lambda: RANK["size"],
    )
    for name in UNUSED:
        stand_in(root, name)
    stand_in(root, f"{BASE}.layers.quantization", resolve_quant_method=None)
    stand_in(
        root,
        f"{BASE}.layers.quantization.base_config",
        QuantizationConfig=type("QuantizationConfig", (), {}),
        QuantizeMethodBase=type("QuantizeMethodBase", (), {}),
        resolve_quant_method=None,
        method_has_implemented_embedding=lambda method: True,
    )
    stand_in(root, f"{BASE}.layers.quantization.online", "vllm/none")
    online = type("OnlineLinearBase", (), {})
    stand_in(root, f"{BASE}.layers.quantization.online.fp8", OnlineLinearBase=online)
    stand_in(root, f"{BASE}.custom_op", PluggableLayer=PluggableLayer)
    stand_in(root, f"{BASE}.utils", set_weight_attrs=set_attributes)
    platform = mock.MagicMock(use_sync_weight_loader=lambda: False)
    sys.modules["vllm.platforms"].current_platform = platform


KINDS = ("qkv", "merged", "column", "row", "vocab")


def make_layers(known, layout, names, files, linear, vocab):
    """vLLM's layers of a family by their paths, and for each tensor of the files its layer and
    shard: the classes and fused parts are those that `engine_classes.py` read.

    Args:
        names: of the files' tensors, without experts.
    """
    kinds = {attribute: kind for attribute, (kind, _) in known["layers"].items()}
    fused = {p: (name, n) for name, ps in known["fused"].items() for n, p in enumerate(ps)}
    layers, places, parts = {}, {}, {}
    for name in names:
        path = name.rpartition(".")[0]
        owner, last = path.rpartition(".")[0], layout.serving.engine_name(path).rpartition(".")[2]
        attribute, number = fused.get(last, (last, None))
        if any(f"{owner}.{part}.weight" not in names for part in known["fused"].get(attribute, ())):
            attribute, number = last, None  # a layer with the name of a part
        kind = kinds.get(attribute)
        if kind in KINDS:
            places[name] = (f"{owner}.{attribute}".removeprefix("."), kind, number)
            parts.setdefault(places[name][0], {}).setdefault(number, {})[name] = files[name]
    for path, by_number in parts.items():
        numbers = sorted(by_number, key=lambda number: number or 0)
        some = {k: v for number in numbers for k, v in by_number[number].items()}
        weights = [t for n, t in some.items() if n.endswith(".weight")]
        kind = next(places[name][1] for name in some)
        bias = any(name.endswith(".bias") for name in some)
        layers[path] = build(kind, weights, bias, layout.facts, linear, vocab)
    return layers, places


def build(kind, weights, bias, facts, linear, vocab):
    """A layer for its full weights, in the order of its parts."""
    heads, kv = (integer_of(facts.config, *names) for names in (HEADS, KV_HEADS))
    kv = kv or heads
    rows, columns = weights[0].shape
    types = {"params_dtype": torch.float32}
    if kind == "qkv":
        dim = rows // (heads if len(weights) > 1 else heads + 2 * kv)
        kv = len(weights[1]) // dim if len(weights) > 1 else kv
        return linear.QKVParallelLinear(columns, dim, heads, kv, bias=bias, **types)
    if kind == "merged":
        sizes = [len(w) for w in weights] if len(weights) > 1 else [rows // 2] * 2
        return linear.MergedColumnParallelLinear(columns, sizes, bias=bias, **types)
    if kind == "vocab":
        made = vocab.ParallelLMHead if bias else vocab.VocabParallelEmbedding
        return made(rows, columns, params_dtype=torch.float32, **({"bias": True} if bias else {}))
    made = {"column": linear.ColumnParallelLinear, "row": linear.RowParallelLinear}[kind]
    return made(columns, rows, bias=bias, **types)


def load_by_vllm(known, layout, files, linear, vocab):
    """The tensors of this rank after vLLM's layers have loaded full ones, with the engine's names;
    without those of other loaders.
    """
    name_of, out = layout.serving.engine_name, {}
    names = [name for name in files if not left_out(name, files[name])]
    layers, places = make_layers(known, layout, names, files, linear, vocab)
    for name in names:
        if name not in places:
            out[name_of(name)] = files[name].float()
            continue
        path, kind, number = places[name]
        leaf = name.rpartition(".")[2]
        parameter = getattr(layers[path], leaf)
        shard = () if number is None else ("qkv"[number] if kind == "qkv" else number,)
        parameter.weight_loader(parameter, files[name].float(), *shard)
        out[name_of(f"{path}.{leaf}")] = parameter.data
    return out


OTHER = {"sinks", "q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj"}

EXPERT = re.compile(r"\.experts\.|_linear\.weight$")


def layouts():
    """(family, layout, files) of each family of the page, at several sizes."""
    engine = json.loads((Path(__file__).parent / "engine_classes.json").read_text())["vllm"]
    cases = [(LLAMA, tp, {"num_key_value_heads": kv}) for kv, tp in ((2, 4), (1, 8), (8, 8))]
    cases += [(tiny_config(family), 2, {}) for family in families_of("vllm")]
    for config, tp, more in cases:
        family = config["model_type"]
        facts, sink = facts_of({**config, **more}), Sink()
        done = compile(read("serve/vllm.plan", sink), facts, sink, settings=[f"tp={tp}"])
        assert not sink.has_errors, (family, [*sink])
        yield family, engine[family], EngineLayout(serving_of(done.plan), facts, sink)


def main(root):
    install(root)
    linear = importlib.import_module(f"{BASE}.layers.linear")
    vocab = importlib.import_module(f"{BASE}.layers.vocab_parallel_embedding")
    wrong = compared = 0
    for family, known, layout in layouts():
        side = layout.side()
        files, tp = files_of(side), layout.serving.tp
        for rank in range(tp):
            RANK.update(rank=rank, size=tp)
            theirs = load_by_vllm(known, layout, files, linear, vocab)
            ours = {name: tensor.float() for name, tensor in fill(side, rank, files).items()}
            ours = {n: t for n, t in ours.items() if n in theirs or not left_out(n, t)}
            differ = [n for n in {**ours, **theirs} if not same(ours.get(n), theirs.get(n))]
            compared += len(theirs)
            if differ:
                wrong += 1
                print(f"{family}, tp {tp}, rank {rank}: vLLM's loaders differ: {differ[:3]}")
        print(f"{family}, tp {tp}: {len(theirs)} tensors a rank compared")
    print(f"{compared} tensors compared")
    return wrong


def left_out(name, tensor):
    """Whether other loaders divide or concatenate a tensor: of experts, sinks, latent projections,
    and norms of single heads.
    """
    parts = name.split(".")
    norm = parts[-2] in ("q_norm", "k_norm") and tensor.dim() > 1
    return norm or bool(EXPERT.search(name)) or not OTHER.isdisjoint(parts[-2:])


def same(one, other):
    return one is not None and other is not None and torch.equal(one, other)


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]))))
