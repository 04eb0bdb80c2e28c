"""Four processes that train, one of which does something else in its third step: `python
hanging.py FAULT FOLDER [DEVICE]`, on `cpu` over gloo, or on `cuda` over NCCL. They hang until they
are killed; their watchdogs write into FOLDER/dumps.
"""

import os
import signal
import sys
from pathlib import Path
from unittest import mock

WORLD = 4
SECONDS = 4
SETTINGS = {"crossed": ("pp=4", "microbatches=4")}
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def settings(fault):
    return SETTINGS.get(fault, ("tp=2",))


def train(rank, fault, folder, device):
    import torch
    from torch import distributed, nn
    from transformers import LlamaConfig, LlamaForCausalLM

    import planc
    from planc.runtime.standalone.pipeline_schedule import RunningStage

    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), WORLD)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = distributed.get_default_backend_for_device(device)
    distributed.init_process_group(backend, rank=rank, world_size=WORLD, store=store)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).to(device)
    run = planc.apply(
        model, "llama", overrides=settings(fault), require="nothing", watchdog=SECONDS
    )
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.randint(1, 96, (4, 16), generator=torch.Generator().manual_seed(run.data_rank))
    ids = ids.to(device)
    for step in range(4):
        wrong = fault if step == 2 else ""
        if wrong in SIGNALS and rank == 3:
            os.kill(os.getpid(), SIGNALS[wrong])
        if wrong == "layer" and rank == 3:
            layer = model.model.layers[1]
            plain = nn.Module.__call__
            type(layer).__call__ = (
                lambda m, h, *a, **k: h if m is layer else plain(m, h, *a, **k)  # noqa: B023
            )
        if wrong == "crossed" and rank == 2:
            mock.patch.object(RunningStage, "get_fwd_send_ops", lambda *_: []).start()
        run.forward_backward([{"input_ids": ids, "labels": ids}])
        if not (wrong == "clip" and rank == 1):
            run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def main(fault, folder, device="cpu"):
    folder = Path(folder)
    os.environ["PLANC_HANG_DIR"] = str(folder / "dumps")
    import torch  # noqa: F401 (once for all)
    from transformers import LlamaConfig

    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    ranks = []
    for rank in range(WORLD):
        pid = os.fork()
        if not pid:
            sys.stderr = (folder / f"{rank}.err").open("w", buffering=1)
            try:
                train(rank, fault, folder, device)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        ranks.append(pid)
    for pid in ranks:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
