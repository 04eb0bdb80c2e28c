"""Several ranks on one GPU over NCCL: `PYTHONPATH=tests/gpu/shared`.

NCCL refuses two ranks of one host on one device, and knows a host by `NCCL_HOSTID`. So each rank
says that it is a host of its own, and what they send goes through sockets.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder

os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")
if rank := os.environ.get("RANK"):
    os.environ.setdefault("NCCL_HOSTID", f"rank-{rank}")


def _shared(cuda):
    """The first device, whatever the rank; verify's ranks say theirs here."""
    one = cuda.set_device

    def set_device(device):
        if isinstance(device, int):
            os.environ.setdefault("NCCL_HOSTID", f"rank-{device}")
        one(0)

    cuda.set_device = set_device


def _on_cuda(numerics):
    numerics.device_for = lambda ranks: "cuda"


CHANGED = {"torch.cuda": _shared, "planc.simulate.numerics": _on_cuda}


class _Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        change = CHANGED.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        plain = spec.loader.exec_module

        def executed(module):
            plain(module)
            change(module)

        spec.loader.exec_module = executed
        return spec


sys.meta_path.insert(0, _Finder())
