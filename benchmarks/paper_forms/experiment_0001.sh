#!/usr/bin/env bash
# Runs docs/experiments/0001-forms-of-the-papers.md on one GPU, a part at a time:
#   benchmarks/paper_forms/experiment_0001.sh PART TEXTS OUT
# PART: tiles, keys (untuned, 7,680 tokens), thresholds (before the next), long-I (a third of the documents at
# 130,500 tokens, I from 0 to 2), decode, decay.
# TEXTS: a folder that these have written, SymPy's sources to calibrate on (they are of set B):
#   python -m deltafront.benchmarks.accuracy.sources TEXTS
#   python -m deltafront.benchmarks.accuracy.sources TEXTS/calibration --packages sympy
# OUT: for results, and for the profile that `thresholds` leaves for `long-I`. Merge shards with `accuracy.merge OUT/PART_*.json`.
set -euo pipefail
part=$1 texts=$2 out=$3
python=${PYTHON:-python3} together=${TOGETHER:-3}
mkdir -p "$out"
here=deltafront.benchmarks

shards() { # NAME FIRST LAST OF ARGUMENTS…: shards FIRST to LAST of OF beside each other
  local name=$1 first=$2 last=$3 of=$4 pids=() shard
  shift 4
  for ((shard = first; shard <= last; shard++)); do
    "$python" -m "$here.accuracy" --text "$texts"/*.txt "$@" --shard "$shard/$of" \
      --result "$out/${name}_$shard.json" > "$out/${name}_$shard.out" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
}

untuned=(--no-adapter --documents 42x7680 --tasks copies:8 --seed 61 --chunk 7680)
whole=(--chunk 65536 --seed 61 --documents 21x130500)
density() { # METHOD STRIDE NUMBER: the density of its level of this number
  "$python" -c 'import json, sys
name, stride, number = sys.argv[2:]
rows = [row for row in json.load(open(sys.argv[1]))["prefill"] if row["method"] == name]
(row,) = [row for row in rows if not stride or row["options"]["stride"] == int(stride)]
print(row["levels"][int(number)]["density"])' "$out/profile.json" "$@"
}

case $part in
  tiles)
    some=min_tokens=0,share=0.25
    shards tiles 0 $((together - 1)) "$together" "${untuned[@]}" --methods "xattention:$some" \
      "xattention:$some,stride=16" "xattention:$some,stride=64" "xattention_paper:$some,pattern=1" \
      "xattention_paper:$some,pattern=2" "naive:$some" "block_pool:$some" "dpxa:$some,window=128" \
      "dpxa_thesis:$some" streaming:min_tokens=0,window=768
    ;;
  keys)
    phases=delta_kv_thesis:min_tokens=0
    shards keys 0 $((together - 1)) "$together" "${untuned[@]}" --methods delta_kv:min_tokens=0 \
      delta_kv:min_tokens=0,means=0 $phases $phases,counts=0 $phases,diagonal=0 $phases,history=0 \
      delta_kv_periodic:min_tokens=0 delta_kv_random:min_tokens=0
    ;;
  thresholds)
    cp deploy/models/smollm2-135m-128k/profile.json "$out/profile.json"
    "$python" -m "$here.paper_forms.coverage" --text "$texts/calibration/sympy.txt" --tokens 131000 --questions 0 \
      --profile "$out/profile.json" | tee "$out/thresholds.out"
    for stride in 8 16; do
      "$python" -m "$here.paper_forms.minimum_threshold" --text "$texts/calibration/sympy.txt" --tokens 12288 \
        --questions 40 --method xattention_paper:stride=$stride --density 0.15 \
        --profile "$out/profile.json" | tee -a "$out/thresholds.out"
    done
    ;;
  long-[012])
    first=$((together * ${part#long-}))
    shards long "$first" $((first + together - 1)) $((3 * together)) "${whole[@]}" \
      --tasks copies:16 needles:40 --profile "$out/profile.json" --methods streaming \
      streaming+delta:gamma=8 streaming+delta:gamma=16 streaming+delta streaming+delta:gamma=8,spread=0 \
      streaming+delta:gamma=64,spread=0 dpxa:density=0.075 delta_kv delta_kv:means=0 xattention \
      xattention:stride=16 "dpxa_thesis:density=$(density dpxa_thesis '' 0)" \
      "dpxa_thesis:density=$(density dpxa_thesis '' 1)" \
      "xattention_paper:stride=8,density=$(density xattention_paper 8 0)" \
      "xattention_paper:stride=16,density=$(density xattention_paper 16 0)"
    ;;
  decode)
    shards decode 0 $((together - 1)) "$together" "${whole[@]}" --tasks needles:6 --decode-questions 6 \
      --methods dense --decode quest:256 8,14,18,21:672 8,14,18,21:256 periodic:4:256 random:4:1:256 \
      8,14,18,21:256:4 8,14,18,21:256:16
    ;;
  decay)
    "$python" -m "$here.paper_forms.delta_decay" --text "$texts"/{networkx,rich,transformers}.txt \
      --tokens 130500 --questions 100 --gamma 2 8 16 64 256 | tee "$out/decay.out"
    ;;
  *) echo "no part $part" >&2 && exit 2 ;;
esac
