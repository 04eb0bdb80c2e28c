"""Activation checkpointing: which modules are recomputed in the backward pass, within a budget."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    example="model.layers.* : full",
    codes=(
        ("PL430", "error", "plan", "nested checkpointed modules"),
        ("PL433", "error", "plan", "the model itself is checkpointed"),
        ("PL470", "error", "plan", "unknown operators in a save list"),
        ("PL471", "error", "plan", "an operator that is never dispatched"),
        ("PL472", "error", "plan", "an operator occurs twice in a save list"),
        ("PL473", "error", "plan", "activation offload in compiled modules"),
        ("PL583", "error", "plan", "a budget smaller than the inputs of its modules"),
        ("PL584", "error", "plan", "a budget for modules whose calls cannot be counted"),
        ("PL672", "warning", "plan", "recomputation with different random numbers"),
    ),
    other_words={
        "checkpoint { model.layers.* : full }": "activation_checkpointing gradient_checkpointing "
        "activation_checkpoint checkpointing checkpoint_wrapper recompute",
        "ops(save = [attention, matmul(every = 2)])": "selective",
    },
)
