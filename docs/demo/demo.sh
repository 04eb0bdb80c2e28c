#!/usr/bin/env bash
# The tour of `make demo`: every command is printed and run.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
mkdir -p build/demo

say() { printf '\n== %s\n' "$*"; }
run() { printf '\n$ %s\n' "$*"; "$@"; }
finds() { printf '\n$ %s\n' "$*"; local code=0; "$@" || code=$?; [ "$code" = 1 ]; }

say "Is the plan right for Llama 3.1 8B on 64 ranks, and for 70B on 512?"
run planc check llama-3.1-8b llama --world-size 64 --set tp=8
run planc check llama-3.1-70b llama --world-size 512 --set tp=8

say "Which torch calls does it mean?"
run planc lower llama-3.1-8b llama --world-size 64 --set tp=8

say "What changes from tp 4 to tp 8? And after an edit of the plan?"
finds planc diff llama-3.1-8b llama --world-size 64 --old-set tp=4 --new-set tp=8
finds planc diff llama-3.1-8b llama docs/demo/mine.plan --world-size 64 --set tp=8

say "What does a broken plan look like?"
finds planc check llama-3.1-8b docs/demo/broken.plan --world-size 64

say "Does it train the same model? One process, then four: tp 2, dp_shard 2, sequence parallel"
run python docs/demo/train.py --out build/demo/one.json
run torchrun --standalone --nproc-per-node 4 docs/demo/train.py --plan llama --set tp=2 \
    --set param_dtype=fp32 --out build/demo/four.json
run python docs/demo/curves.py build/demo/one.json build/demo/four.json
