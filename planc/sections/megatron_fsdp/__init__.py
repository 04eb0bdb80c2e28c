"""Megatron-FSDP, the backend that `backend = megatron` in an fsdp section names."""
