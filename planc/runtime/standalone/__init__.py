"""What torch lacks: `apply` calls these definitions, emitted scripts inline them."""
