"""Matrix products of linear layers in 8 bits, through torchao."""
