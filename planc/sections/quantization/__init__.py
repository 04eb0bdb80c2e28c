"""Frozen weights of layers with adapters, in 4 bits: the action `qlora` of an adapters section."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    adapters={"qlora": ("quant", "storage", "compute", "double", "block")},
    codes=(
        ("PL680", "error", "plan", "4-bit weights that FSDP would cast"),
        ("PL681", "error", "plan", "a layer that cannot be quantized to 4 bits"),
        ("PL682", "error", "plan", "a tied weight in 4 bits"),
        ("PL683", "error", "plan", "a trainable 4-bit weight"),
        ("PL684", "error", "plan", "4-bit weights whose shards are not multiples of a block"),
        ("PL685", "error", "runtime", "4-bit weights need bitsandbytes"),
        ("PL686", "error", "runtime", "4-bit weights cannot be exported"),
        ("PL687", "error", "runtime", "a checkpoint that does not contain the 4-bit weights"),
    ),
)
