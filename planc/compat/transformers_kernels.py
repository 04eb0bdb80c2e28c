"""transformers: what loads kernels from the hub, where the package `kernels` is installed."""

from planc.compat.names import private_names, require

with private_names("transformers"):
    from transformers.integrations import hub_kernels
    from transformers.utils import is_kernels_available

if is_kernels_available():
    require("transformers", hub_kernels, "get_kernel_hub")

__all__ = ["hub_kernels"]
