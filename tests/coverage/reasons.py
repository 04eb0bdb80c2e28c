"""What was found out by hand, where a number of docs/generated/coverage.md does not say why."""

THEIRS = {
    "apertus": "the activation's `alpha_p` and `alpha_n` are whole, and each rank keeps the "
    "gradient of its own features; their sum is the right one",
    "doge": "`dt_proj` gives the mask of all heads, where attention has the rank's own",
    "gemma3n_text": "the MLP's sparsity takes mean and deviation over its features, of which a "
    "rank sees its part; without sparsity it is right",
    "gemma4": "the model's own code reads `embed_tokens.weight`, and meets a DTensor",
    "hrm_text": "the checkpoint's fused `gqkv_proj` and `gate_up_proj` are cut by rank before they "
    "are taken apart, so query, key, value, gate and up hold each other's rows",
    "inkling2_text": "trains right, but `experts.gate_up_proj` holds pieces of gate and up under "
    "the placement `Shard(1)`: its whole tensor, which `save_pretrained` writes, is permuted",
    "inkling_text": "the embedding has a norm inside, which meets the sum that is not summed yet",
    "lfm2": "`lm_head` is split and tied to an embedding that is not: it is left a plain tensor",
    "lfm3": "as lfm2",
    "llama4": "what the shared expert gives is added to in place, and is a view of a DTensor",
    "llama4_text": "as llama4",
}
"""Of transformers' own tensor parallelism, where it crashes or is wrong."""

KEPT = {
    "blt": "its code adds to its embeddings in place, and layout flow proved no split of it",
    "dbrx": "the weights of all experts are one matrix, which its code views as experts: "
    "no style of planc splits that",
    "longcat_flash": "identity experts stand among the others and add the input itself, "
    "which a sum over ranks would count once for each",
}
"""Of plans that split less than half."""

UNPROVED = {
    "gemma3n": "can't be built here: its towers need timm and a torchvision made for this torch; "
    "its language model is the row gemma3n_text",
    "gemma4_assistant": "a drafter: its forward takes the embeddings, keys and values of another "
    "model, and gives no loss; its default configuration is refused",
    "gemma4_unified_assistant": "a drafter, as gemma4_assistant",
}
"""Of families without a proof, where the error itself does not say why."""
