"""torchao: products of numbers in 8 bits."""

from planc.compat.names import private_names

with private_names("torchao"):
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

__all__ = ["FLOAT8_OPS_TABLE", "MXFP8TrainingOpConfig", "MXFP8TrainingRecipe"]
