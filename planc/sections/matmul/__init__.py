"""Matrix products of linear layers in 8 bits, through torchao."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    example="model.layers.*.mlp.*_proj : fp8(recipe = rowwise)",
    real_sizes=("PL623",),
    codes=(
        ("PL553", "warning", "plan", "products in 8 bits that the hardware has no rate for"),
        ("PL621", "error", "plan", "products in 8 bits of a module that is no linear layer"),
        ("PL622", "error", "plan", "products in 8 bits of a layer that must keep its precision"),
        ("PL623", "error", "plan", "features on a rank that 8-bit products do not take"),
        ("PL624", "warning", "plan", "products in 8 bits that are not compiled"),
        ("PL625", "error", "plan", "weights that FSDP cannot gather in fp8"),
        ("PL626", "error", "plan", "a recipe whose scales the ranks would compute otherwise"),
        ("PL627", "error", "runtime", "torchao cannot be imported"),
        ("PL628", "error", "runtime", "a device without products in 8 bits"),
        ("PL629", "error", "proof", "products in 8 bits that are others than in one process"),
    ),
)
