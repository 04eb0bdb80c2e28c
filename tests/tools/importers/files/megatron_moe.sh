#!/bin/bash
# Experts that take a number of tokens, as Megatron-LM's README of mixtures has them.
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \
    --tokenizer-model mistralai/Mixtral-8x7B-v0.1 \
    --num-layers 32 --hidden-size 4096 --num-experts 8 --moe-router-topk 2 \
    --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer \
    --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall \
    --moe-expert-capacity-factor 1.5 --moe-token-drop-policy position \
    --moe-pad-expert-input-to-capacity
