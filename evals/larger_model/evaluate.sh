#!/usr/bin/env bash
# Measures the larger model on one GPU: the tables of docs/recipes.md and docs/quantized-weights.md.
#
#   evals/larger_model/evaluate.sh STAGE MODEL TEXTS WORK RESULTS
#
# Stages: `long` for the drift in long texts, `tasks` for zero-shot tasks under recipes, `tables` for everything else.
# The first two add to the results of `tables`. TEXTS holds wikitext2.test.raw, wikitext2.valid.tokens and zero_shot/.
# Records and logs go to WORK: a stage that was interrupted goes on there. Results go to RESULTS. With DATA, the
# articles, WORK/evaluation.log has the validation loss and perplexities. Several processes share the GPU, because each
# step of a model of this size is mostly launches.
set -euo pipefail
cd "$(dirname "$0")/../.."
stage=$1 model=$2 texts=$3 work=$4 results=$5
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:$PWD/evals${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false PYTORCH_ALLOC_CONF=expandable_segments:True
mkdir -p "$work" "$results"

# Recipes that write in one batch, a line for each process, and those of the long texts.
groups=${GROUPS_OF_RECIPES:-"int8,k8v4,int4,int4-g32,int4-channel,k4v2,int2,fp8,naive-4,naive-3
naive-2,quarot-4,quarot-3,quarot-2,saw-4,kivi-4,kivi-2,kvquant-4
kvquant-3,turboquant-4,turboquant-3,turboquant-2,turboquant-prod-4,turboquant-prod-3,polarquant,kvarn-k4v4
kvarn-k4v2,kvarn-k2v2,oscar-2,mxfp4,nvfp4,int3:4+128,int2-g64:4+128,int4-channel+int2:4+128"}
long_groups=${LONG_GROUPS:-"int4,k4v2,int2"}
all=$(tr '\n' ',' <<<"$groups" | sed 's/,$//')
# Without their dense tokens, which take 0.06 bits at 32k. Beside the first group, and wherever recipes have their own.
budget="--bits ${BITS:-2.74}"

jobs=() status=0
# start NAME COMMAND...: in the background, with its log in WORK.
start() {
    local name=$1
    shift
    mkdir -p "$work/$(dirname "$name")"
    "$@" >"$work/$name.log" 2>&1 &
    jobs+=("$! $name")
}
# recipes NAME OPTIONS...: one record.
recipes() {
    local name=$1
    shift
    start "$name" "$python" -m hf_kvquant eval recipes "$model" --text "$texts/wikitext2.test.raw" --rows \
        --output "$work/$name.json" "$@"
}
# grouped RUN GROUPS OPTIONS...: one record for each group, in a folder of its own, since a run is named after its file.
grouped() {
    local run=$1 lines=$2 index=0 extra=$budget group
    shift 2
    [[ " $* " != *" --dense "* ]] || extra=
    while read -r group; do
        recipes "$run-$index/$run" --recipes "$group" $extra --needles 0 "$@"
        index=$((index + 1)) extra=
    done <<<"$lines"
}
# finish: waits for everything that was started since the last time.
finish() {
    local failed=0 job
    for job in "${jobs[@]}"; do
        wait "${job%% *}" || { failed=1; echo "failed: ${job#* }"; tail -n 5 "$work/${job#* }.log"; }
        echo "$SECONDS s: ${job#* }"
    done
    jobs=()
    return $failed
}
# joined RUN: adds the records of all groups but the first, which is there already.
joined() {
    local file
    for file in $(ls "$work/$1"-*/"$1".json | tail -n +2); do
        "$python" evals/recipes.py --add --output "$results/recipes_larger.json" "$file"
    done
}

hard="--dtype float32 --drift 0 --needles 0 --tokens ${HARD_TOKENS:-4000}"
case $stage in
tables)
    ablation=("$python" evals/ablation.py --model "$model" --device "${DEVICE:-cuda}" --text "$texts/wikitext2.test.raw"
        --calibrate "$texts/wikitext2.valid.tokens" --tokens "${ABLATION_TOKENS:-8192}")
    start ablation "${ablation[@]}" --tasks-data "$texts/zero_shot" --limit "${LIMIT:-200}" \
        --output "$results/ablation_larger.json"
    start ablation_outliers "${ablation[@]}" --inject-outliers 10 --output "$results/ablation_larger_outliers.json"
    aside=("${jobs[@]}") jobs=()
    # In two waves, for 80 GB.
    recipes outliers --recipes "$all" $budget $hard --inject-outliers 8
    recipes bias --recipes "$all" $budget $hard --inject-bias 100
    recipes codes --recipes "$all" $hard --dense 0+0
    recipes windows --recipes "$all" $hard --dense 4+128
    recipes needles --recipes "$all" $budget --dtype float32 --tokens 2000 --drift 0 --needles "${NEEDLES:-12}"
    [ -z "${DATA:-}" ] || start evaluation "$python" evals/reference_model/train.py evaluate --out "$model" \
        --context 2048 --data "$DATA" --wikitext "$texts/wikitext2.test.raw"
    finish || status=1
    grouped plain "$groups" --drift-together 16 --dtype float32 --tokens "${TOKENS:-12000}" --drift "${DRIFT:-1024}"
    finish || status=1
    "$python" evals/recipes.py --output "$results/recipes_larger.json" "$work/plain-0/plain.json" \
        "$work"/{outliers,bias,codes,windows,needles}.json
    joined plain
    cp "$results/recipes_larger.json" "$work"
    jobs=("${aside[@]}")
    finish || status=1
    ;;
long)
    # In bfloat16, for attention without a copy of keys and values for each query head.
    grouped long "$long_groups" --drift-together 16 --dtype bfloat16 --tokens 2000 --drift "${LONG:-16352}" \
        --drift-prompts 4
    finish
    cp "$work/recipes_larger.json" "$results"
    "$python" evals/recipes.py --add --output "$results/recipes_larger.json" "$work/long-0/long.json"
    joined long
    ;;
tasks)
    zero_shot="--dtype float32 --tokens 2000 --drift 0 --tasks piqa arc_easy arc_challenge hellaswag winogrande"
    zero_shot+=" --limit ${LIMIT:-200} --batch-size 32"
    grouped tasks "$groups" $zero_shot --data "$texts/zero_shot"
    grouped tasks-codes "$groups" $zero_shot --data "$texts/zero_shot" --dense 0+0
    finish
    for run in tasks tasks-codes; do
        "$python" evals/recipes.py --add --output "$results/recipes_larger.json" "$work/$run-0/$run.json"
        joined $run
    done
    cp "$results/recipes_larger.json" "$work" # where `long` starts from
    ;;
esac
exit $status
