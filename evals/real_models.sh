#!/usr/bin/env bash
# Measures what presets and published recipes cost on a real model (evals/real_model/README.md).
#
#   evals/real_models.sh MODEL TEXTS RESULTS [DEVICE]
#
# TEXTS holds wikitext2.test.raw, which is measured, wikitext2.valid.tokens, on which is calibrated, and zero_shot/, the
# items of tasks. On a GPU, caches are real, token by token; on a CPU, one forward computes the same, which a check of
# each run confirms. The ways to read:
#
#   generate  a prompt in one chunk, then 511 tokens one by one: what `generate` does; `windows`: with dense tokens;
#             `long`: behind 7,680 tokens; `position`: behind 128; `bits`: what `for_model(bits=...)` finds
#   chunks    chunks of 256 tokens from the first token on, as a server reads long prompts
#   steps     token by token from the first one on
#
# Beside these: `tasks`, zero-shot tasks, under presets and, behind 512 tokens of text, under recipes; `needles`, numbers
# hidden in long prompts; `drift`, texts that the model writes with recipes.
#
# JOBS processes run at once (GPU: 4, CPU: 1). RUNS names some runs only, such as "fidelity-long record-needles".
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 texts=$2 results=$3 device=${4:-cpu}
python=${PYTHON:-python3}
work=${WORK:-build/real-models}
export PYTHONPATH=$PWD:$PWD/evals${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
mkdir -p "$work" "$results"

one_by_one="--mode simulated --chunk 1" at_once=${JOBS:-1} items=8
[ "$device" = cpu ] || one_by_one="--mode decode" at_once=${JOBS:-4} items=64
generate="--window 2048 --prompt 1536 --tokens ${TOKENS:-4088}"
long="--window 8192 --prompt 7680 --tokens ${LONG_TOKENS:-1533}"
# Memory holds a window under every preset at once: 8,192 tokens of nine presets take more than 20 GB.
position="--window 4096 --prompt 128 --mode simulated --chunk 1 --tokens ${POSITION_TOKENS:-3967} --preset int8"
position+=" --preset k8v4:0+0 --preset k8v4 --preset int4-token --preset int4-channel --preset int4"
bits="--window 2048 --prompt 1536 --tokens ${BITS_TOKENS:-2044} --mode simulated --chunk 1 --preset k8v4 --preset int4"
bits+=" --preset k4v2 --bits 3.5 4.5 6.4 --bits-text $texts/wikitext2.valid.tokens"
chunks="--window 2048 --mode chunked --chunk 256 --tokens ${CHUNK_TOKENS:-16368}"
presets="--preset int8 --preset k8v4 --preset int4 --preset int4-channel --preset int4-token --preset int4-g32"
presets+=" --preset k4v2 --preset int2 --preset fp8"
zero_shot="--data $texts/zero_shot --batch-size $items"
# What writes texts and answers tasks: presets, and others of about as many bits. All recipes would take hours.
some="--recipes int8,k8v4,int4,int4-channel,int4-token,k4v2,int2,fp8,q8_0,q4_0,quanto-4,vllm-int4,kivi-4,kvarn-k4v4,oscar-2"
calibrated="--calibrate $texts/wikitext2.valid.tokens --calibrate-for int4-token"
calibrated+=" --preset int8 --preset k8v4 --preset int4 --preset int4-token --preset int4-g32 --preset k4v2 --preset int2"

# fidelity NAME OPTIONS...: a results file, real_NAME.json.
fidelity() {
    "$python" evals/fidelity.py --model "$model" --data "$texts/wikitext2.test.raw" --device "$device" "${@:2}" \
        --record "$work/$1.record.json" --output "$results/real_$1.json"
}
# recipes NAME OPTIONS...: a record, of which all become one results file.
recipes() {
    "$python" -m hf_kvquant eval recipes "$model" --text "$texts/wikitext2.test.raw" --rows --dtype float32 \
        --device "$device" --drift 0 --needles 0 "${@:2}" --output "$work/$1.json"
}
# record NAME EVALUATION OPTIONS...: a record of `hf-kvquant eval`, which is a results file, real_NAME.json.
record() {
    "$python" -m hf_kvquant eval "$2" "$model" --dtype float32 --device "$device" "${@:3}" --output "$work/real_$1.json"
    cp "$work/real_$1.json" "$results"
}
# start FUNCTION NAME OPTIONS...: as soon as fewer than JOBS run.
jobs=() failed=0
start() {
    [[ " ${RUNS:-$1-$2} " == *" $1-$2 "* ]] || return 0
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do sleep 1; done
    echo "$SECONDS s: $1 $2"
    "$@" >"$work/$1-$2.log" 2>&1 &
    jobs+=("$! $1-$2")
}

start fidelity generate $generate $one_by_one
start fidelity windows $generate --mode simulated --chunk 1 --preset int4-token:4+32 --preset int4-token:4+124 \
    --preset int4:4+124 --preset k8v4:0+0 --preset int8:4+0 --preset int8:4+12
start fidelity bits $bits
start fidelity long $long --mode simulated --chunk 1 --preset int8 --preset k8v4 --preset int4-token \
    --preset int4-channel --preset int4 --preset int4:4+124
start fidelity position $position
start fidelity generate_calibrated $generate $one_by_one $calibrated
start fidelity chunks $chunks
start recipes generate $generate
start recipes steps --window 2048 --tokens "${TOKENS:-4088}"
start recipes long $long --recipes quanto-4
start recipes drift --window 2048 --tokens 2000 $some --drift "${DRIFT:-1024}" --drift-prompts 16 --drift-together 16
start recipes tasks --window 2048 --tokens 2000 $some $zero_shot --limit "${LIMIT:-200}" \
    --tasks piqa arc_easy arc_challenge
start record tasks tasks $presets $zero_shot --limit "${LIMIT:-500}" --tasks piqa
# Not `recall`: in a list of 1,024 tokens, the model finds no number.
start record needles long $presets --tests passkey,needle --lengths "${LENGTHS:-1k,2k,4k,7680}" --depths 0,50,100 \
    --samples "${SAMPLES:-20}"
for job in "${jobs[@]}"; do
    wait "${job%% *}" || { failed=1; echo "failed: ${job#* }"; tail -n 5 "$work/${job#* }.log"; }
done
[ "$failed" = 0 ]
[ -n "${RUNS:-}" ] || "$python" evals/recipes.py --output "$results/recipes_real.json" \
    "$work"/{generate,steps,long,drift,tasks}.json
echo "$SECONDS s in all"
