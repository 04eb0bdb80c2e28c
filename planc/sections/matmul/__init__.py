"""fp8 and mxfp8 matmuls of linear layers, through torchao."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    example="model.layers.*.mlp.*_proj : fp8(recipe = rowwise)",
    real_sizes=("PL623",),
    codes=(
        ("PL553", "warning", "plan", "fp8 matmuls that the hardware has no rate for"),
        ("PL621", "error", "plan", "fp8 matmuls of a module that is not a linear layer"),
        ("PL622", "error", "plan", "fp8 matmuls of a layer that must keep its precision"),
        ("PL623", "error", "plan", "feature sizes on a rank that fp8 matmuls do not accept"),
        ("PL624", "warning", "plan", "fp8 matmuls that are not compiled"),
        ("PL625", "error", "plan", "weights that FSDP cannot gather in fp8"),
        ("PL626", "error", "plan", "a recipe whose scales the ranks would compute otherwise"),
        ("PL627", "error", "runtime", "torchao cannot be imported"),
        ("PL628", "error", "runtime", "a device without fp8 matmuls"),
        ("PL629", "error", "proof", "fp8 matmuls that differ from those of one process"),
    ),
)
