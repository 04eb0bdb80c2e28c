"""transformers: how it lists its models; imported before any of them."""

from planc.compat.names import private_names, require

with private_names("transformers"):
    from transformers.utils import import_utils

require("transformers", import_utils, "create_import_structure_from_path")

__all__ = ["import_utils"]
