#!/usr/bin/env bash
# Trains the larger model of the evaluations on one GPU, in about nine minutes. README.md beside this file describes it.
#
#   evals/larger_model/train.sh DATA OUT
#
# DATA are the articles that the reference model was trained on (see `reference_model/README.md`). Of OUT/short, the
# first training, the second goes on in long windows; its result is in OUT. `MINUTES` and `LONG_MINUTES` are their times
# without preparation, `ARTICLES` those that the second one reads.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=$1 out=$2
python=${PYTHON:-python3}

train() {
    "$python" evals/reference_model/train.py train --data "$data" --tokenizer evals/reference_model --wikitext-style \
        --hidden-size 1024 --intermediate-size 2048 --layers 12 --query-heads 8 --kv-heads 2 "$@"
}

# Half the reference model's batch: there is time for a twelfth of its tokens, and more steps use them better.
train --out "$out/short" --minutes "${MINUTES:-4.3}" --batch-rows 32 \
    --learning-rate 4e-3 --embedding-learning-rate 5e-3 ${REHEARSAL:-}
# Windows eight times as long. The base of the rotary positions rises with them, so that slow pairs do not reach angles
# that they have never seen.
train --out "$out" --init "$out/short" --articles "${ARTICLES:-3000}" --minutes "${LONG_MINUTES:-0.9}" \
    --context 16384 --rope-theta 100000 --batch-rows 4 \
    --learning-rate 1.5e-3 --embedding-learning-rate 1.5e-3 --warmup 0.1 ${REHEARSAL:-}
cp evals/reference_model/tokenizer.json evals/reference_model/tokenizer_config.json "$out"
