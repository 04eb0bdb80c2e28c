#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
NUM_NODES=4
TP_SIZE=${TP_SIZE:-8}
PP_SIZE=4

DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --num-layers 80 # as the model has
    --hidden-size 8192
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model meta-llama/Llama-3.1-70B
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} \
    --micro-batch-size 1 --global-batch-size 1536 \
    --lr 6.0e-5 --lr-decay-style cosine \
    --bf16 \
    --tensor-model-parallel-size ${TP_SIZE} \
    --pipeline-model-parallel-size $PP_SIZE \
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce \
    --recompute-granularity selective --data-path "$DATA_PATH"
