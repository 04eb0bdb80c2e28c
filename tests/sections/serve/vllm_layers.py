"""vLLM's own linear and vocabulary layers as the judge of a serve section.

`python -W ignore vllm_layers.py FOLDER`, where `FOLDER/vllm` has the Python files of its wheel. The
files linear.py, vocab_parallel_embedding.py and parameter.py of its layers run as they are, on
stand-ins for what they import, so no extension and no GPU is needed. Each rank's layers load full
tensors by their `weight_loader`; the slices that planc derives must be equal.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import torch
from tiny_engines import DENSE, LLAMA, files_of, fill, serve, side_of
from torch import nn

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


def set_attributes(weight, attributes):
    for name, value in (attributes or {}).items():
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


def load_by_vllm(config, files, linear, vocab):
    """The tensors of this rank after vLLM's layers have loaded full ones."""
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim, hidden, wide = config["head_dim"], config["hidden_size"], config["intermediate_size"]
    kinds, words = {"bias": False, "params_dtype": torch.float32}, config["vocab_size"]
    make = {
        "qkv_proj": lambda: linear.QKVParallelLinear(hidden, dim, heads, kv, **kinds),
        "gate_up_proj": lambda: linear.MergedColumnParallelLinear(hidden, [wide, wide], **kinds),
        "o_proj": lambda: linear.RowParallelLinear(heads * dim, hidden, **kinds),
        "down_proj": lambda: linear.RowParallelLinear(wide, hidden, **kinds),
        "embed_tokens": lambda: vocab.VocabParallelEmbedding(words, hidden, torch.float32),
        "lm_head": lambda: vocab.ParallelLMHead(words, hidden, params_dtype=torch.float32),
    }
    shards = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": 0, "up_proj": 1}
    read = json.loads((Path(__file__).parent / "engine_classes.json").read_text())
    fused = {p: name for name, parts in read["vllm"]["llama"]["fused"].items() for p in parts}
    layers, out = {}, {}
    for name, tensor in files.items():
        path = name.rpartition(".")[0]
        owner, _, last = path.rpartition(".")
        kind = fused.get(last, last)
        place = f"{owner}.{kind}" if owner else kind
        if kind not in make:
            out[name] = tensor.float()
            continue
        layer = layers.setdefault(place, None) or make[kind]()
        layers[place] = layer
        shard = (shards[last],) if last in shards else ()
        layer.weight.weight_loader(layer.weight, tensor.float(), *shard)
        out[f"{place}.weight"] = layer.weight.data
    return out


def main(root):
    install(root)
    linear = importlib.import_module(f"{BASE}.layers.linear")
    vocab = importlib.import_module(f"{BASE}.layers.vocab_parallel_embedding")
    wrong = 0
    for kv, tp, tied in ((4, 2, False), (2, 4, False), (1, 8, False), (8, 8, True)):
        config = {**LLAMA, "num_key_value_heads": kv, "tie_word_embeddings": tied}
        side = side_of(config, serve(f"on tp = {tp}", DENSE))
        files = files_of(side)
        for rank in range(tp):
            RANK.update(rank=rank, size=tp)
            theirs = load_by_vllm(config, files, linear, vocab)
            ours = {name: tensor.float() for name, tensor in fill(side, rank, files).items()}
            same = ours.keys() == theirs.keys()
            if not same or not all(torch.equal(ours[n], theirs[n]) for n in ours):
                wrong += 1
                print(f"{kv} key-value heads, tp {tp}, rank {rank}: vLLM's loaders differ")
        print(f"{kv} key-value heads, tp {tp}: {len(ours)} tensors a rank compared")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]))))
