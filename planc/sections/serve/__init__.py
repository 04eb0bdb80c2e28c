"""The layout of a serving engine, whose ranks get the weights of a training plan."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    example="self_attn.qkv_proj : qkv(q_proj, k_proj, v_proj)",
    sized=True,
    codes=(
        ("PL692", "error", "plan", "layers that the ranks of a serving engine cannot divide"),
        ("PL693", "error", "plan", "a serving engine's layer of weights that the model lacks"),
        ("PL694", "error", "plan", "a serving engine for a model whose files are not known"),
        ("PL699", "error", "plan", "a stack of experts that is not sent in fp8"),
    ),
)
