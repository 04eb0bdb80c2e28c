"""Loads a model on four gloo processes in several ways; prints seconds and host peaks as JSON.

    python tests/bench/loading.py FOLDER WAY RANK STORE

FOLDER holds safetensors and is made by `make`. Ways: `slices` and `rank0` are planc's; `accelerate`
is what its `cpu_ram_efficient_loading` does under FSDP2, where accelerate is installed; `torch` is
`set_model_state_dict` with `broadcast_from_rank0`, and `storage` torch's own reader of safetensors
for distributed checkpoints, `HuggingFaceStorageReader`. The peak is the growth of a process's own
memory (`RssAnon`, sampled), without the mapped files, whose pages are the system's cache.
"""

import json
import os
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

WORLD = 4
SHAPE = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
PLAN = """plan b for llama
mesh {
    dp_shard = auto
}
load {
    init    = meta
    weights = WAY
}
fsdp on dp_shard {
    model.layers.* : unit
    root           : unit
}
"""


def config():
    values = dict(SHAPE)
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


def make(folder):
    """A checkpoint of 239 million parameters in float32, in files of 200 MB."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config())
    model.save_pretrained(folder, max_shard_size="200MB")


def anonymous():
    """Bytes of this process's own pages; those of mapped files are the system's cache."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon")


class Peak:
    """The most that `anonymous` grew, sampled every two milliseconds."""

    def __enter__(self):
        self.before = self.most = anonymous()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.ended.wait(0.002):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_):
        self.most = max(self.most, anonymous())
        self.ended.set()
        self.thread.join()

    @property
    def grown(self):
        return self.most - self.before


def by_planc(folder, way):
    import planc

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "b.plan"
        path.write_text(PLAN.replace("WAY", way))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config())
        run = planc.apply(model, str(path), device_type="cpu")
    return model, lambda: run.load(folder)


def sharded():
    """A model on meta with torch's own `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config())
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_torch(folder):
    """Rank 0 has the whole state dict on the CPU, and each tensor is sent from it."""
    model = sharded()

    def load():
        whole = {}
        if distributed.get_rank() == 0:
            for file in sorted(Path(folder).glob("*.safetensors")):
                whole |= {name: tensor.clone() for name, tensor in load_file(file).items()}
        model.to_empty(device="cpu")
        model.model._init_weights(model.model.rotary_emb)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole, options=options)

    return model, load


def by_storage(folder):
    """Every rank reads its own slices, planned by torch.distributed.checkpoint."""
    from torch.distributed import checkpoint

    model = sharded()

    def load():
        model.to_empty(device="cpu")
        model.model._init_weights(model.model.rotary_emb)
        reader = checkpoint.HuggingFaceStorageReader(folder)
        checkpoint.load(model.state_dict(), storage_reader=reader)

    return model, load


def by_accelerate(folder):
    """Rank 0 has the model of `from_pretrained`, and accelerate sends its state dict.

    accelerate shards nothing on the CPU itself, so its function is called as its
    `fsdp2_prepare_model` calls it.
    """
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    model = sharded()
    accelerator = SimpleNamespace(is_main_process=distributed.get_rank() == 0, device="cpu")

    def load():
        whole = {}
        if accelerator.is_main_process:
            kind = transformers.AutoModelForCausalLM
            whole = kind.from_pretrained(folder, dtype=torch.float32).state_dict()
        fsdp2_load_full_state_dict(accelerator, model, whole)

    return model, load


def main():
    folder, way, rank, store = sys.argv[1:]
    os.environ |= {"RANK": rank, "WORLD_SIZE": str(WORLD), "LOCAL_RANK": rank}
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        rank=int(rank),
        world_size=WORLD,
        store=distributed.FileStore(store, WORLD),
        timeout=timedelta(seconds=120),
    )
    makers = {"torch": by_torch, "storage": by_storage, "accelerate": by_accelerate}
    model, load = makers[way](folder) if way in makers else by_planc(folder, way)
    distributed.barrier()
    with Peak() as peak:
        began = time.perf_counter()
        load()
        distributed.barrier()
        seconds = time.perf_counter() - began
    local = [p.to_local() for p in model.parameters()]
    total = sum(float(t.double().sum()) for t in local)
    held = sum(t.numel() * t.element_size() for t in local)
    result = {"seconds": seconds, "peak": peak.grown, "shard": held, "sum": total}
    everyone = [None] * WORLD
    distributed.all_gather_object(everyone, result)
    if rank == "0":
        print(json.dumps(everyone), flush=True)
    distributed.barrier()
    os._exit(0)  # gloo's farewell is slow


if __name__ == "__main__":
    main()
