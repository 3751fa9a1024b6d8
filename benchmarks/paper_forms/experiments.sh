#!/usr/bin/env bash
# Runs docs/experiments/0001 to 0004 on one GPU, a part at a time:
#   benchmarks/paper_forms/experiments.sh PART TEXTS OUT
# PART of 0001: tiles, keys (untuned, 7,680 tokens), thresholds (before long-thresholds), long, long-thresholds
# (130,500 tokens), decode, thresholds-12288 (after thresholds). PART of 0002: code, plays (untuned, 4,096 tokens;
# TEXTS of plays: a folder of them), served-130500, time, far-131, far-262, far-524. PART of
# 0003: forms-keys, forms-tiles (untuned, 7,680 tokens), forms-long, forms-decode (130,500 tokens). PART of 0004:
# far-*, keys with more documents, fp8. The parts `ideas`, `decay` and `outputs` are at d79ddfbf, `ruler-*` and
# `served-8192` at 8b09591d: benchmarks.lab and `deltafront evaluate` now ask RULER's tasks, in its own wording.
# TEXTS: a folder that the first command has written, of far-* the third. `thresholds` and `forms-decode`
# calibrate on SymPy's sources, which are of set B:
#   python -m deltafront.benchmarks.accuracy.sources TEXTS
#   python -m deltafront.benchmarks.accuracy.sources TEXTS/calibration --packages sympy
#   python -m deltafront.benchmarks.accuracy.sources FAR_TEXTS --far
# OUT: for results, and for the profile that `thresholds` leaves. MINUTES (4): no document is begun later. A part
# goes on from OUT/PART*.jsonl when it is run again. TOGETHER: processes beside each other, and shards. MODEL:
# in place of the embedded model's name.
set -euo pipefail
part=$1 texts=$2 out=$3
python=${PYTHON:-python3} together=${TOGETHER:-3}
mkdir -p "$out"
here=deltafront.benchmarks
model=(${MODEL:+--model "$MODEL"})

beside() { # FUNCTION ARGUMENTS…: called with each shard's number behind them, in `together` processes
  local pids=() shard failed=0
  for ((shard = 0; shard < together; shard++)); do
    "$@" "$shard" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  return "$failed"
}
shards() { # ARGUMENTS…: all documents, in processes beside each other; then their rows together
  beside one_shard "$@"
  local results=() shard
  for ((shard = 0; shard < together; shard++)); do results+=("$out/${part}_$shard.json"); done
  "$python" -m "$here.accuracy.merge" "${results[@]}" --result "$out/$part.json"
}
one_shard() { # ARGUMENTS… SHARD
  local shard=${!#}
  "$python" -m "$here.accuracy" "${model[@]}" --text "$texts"/*.txt "${@:1:$#-1}" --minutes "${MINUTES:-4}" \
    --outcomes "$out/${part}_$shard.jsonl" --shard "$shard/$together" \
    --result "$out/${part}_$shard.json" > >(tee "$out/${part}_$shard.out") 2>&1
}

untuned=(--no-adapter --documents 42x7680 --tasks copies:8 --seed 61 --chunk 7680)
whole=(--chunk 65536 --seed 61 --documents 21x130500)
shipped=(--profile deploy/models/smollm2-135m-128k/profile.json)
level=density=0.075,cos=0.75,centred=0 # recorded as dpxa:density=0.075, before `centred` was an option
some=min_tokens=0,share=0.25
density() { # METHOD STRIDE NUMBER: the density of its level of this number
  "$python" -c 'import json, sys
name, stride, number = sys.argv[2:]
rows = [row for row in json.load(open(sys.argv[1]))["prefill"] if row["method"] == name]
(row,) = [row for row in rows if not stride or row["options"]["stride"] == int(stride)]
print(row["levels"][int(number)]["density"])' "$out/profile.json" "$@"
}
far() { # TOKENS ROPE_THETA COUNT METHODS…: more than are named here
  local tokens=$1 theta=$2 count=$3
  shift 3
  shards "${shipped[@]}" --documents "${count}x$tokens" --positions "$tokens" --rope-theta "$theta" --tasks prose \
    --seed 71 --chunk 65536 --methods dpxa:$level dpxa:share=0.05 xattention:share=0.05 streaming "$@"
}
served() { # TOKENS COUNT TASK:COUNT…: the shipped configuration, or CONFIG
  local tokens=$1 count=$2
  shift 2
  "$python" -m "$here.accuracy.served" --config "${CONFIG:-deploy/config/gpu.yaml}" --text "$texts"/*.txt \
    --tokens "$tokens" --documents "$count" --tasks "$@" --seed 83 --minutes "${MINUTES:-4}" \
    --cases dense=dense dpxa=dpxa delta=dense@delta shipped=dpxa@delta --hardware "${HARDWARE:-}" \
    --outcomes "$out/$part.jsonl" --result "$out/$part.json"
}
short() { # COUNT TASK:COUNT: untuned, at 4,096 tokens
  shards --no-adapter --documents "$1x4096" --tasks "$2" --seed 61 --chunk 4096 --key-tokens 1024 --methods \
    "xattention:$some" "xattention:$some,stride=16" "block_pool:$some" "dpxa_thesis:$some" \
    "dpxa:$some,window=128" streaming:min_tokens=0,window=768
}
case $part in
  tiles)
    shards "${untuned[@]}" --methods "xattention:$some" \
      "xattention:$some,stride=16" "xattention:$some,stride=64" "xattention_paper:$some,pattern=1" \
      "xattention_paper:$some,pattern=2" "block_pool:$some" "dpxa:$some,window=128" \
      "dpxa_thesis:$some" streaming:min_tokens=0,window=768
    ;;
  keys)
    phases=delta_kv_thesis:min_tokens=0
    shards "${untuned[@]}" --methods delta_kv:min_tokens=0 \
      delta_kv:min_tokens=0,means=0 $phases $phases,counts=0 $phases,diagonal=0 $phases,history=0 \
      delta_kv_periodic:min_tokens=0 delta_kv_random:min_tokens=0
    ;;
  thresholds)
    cp deploy/models/smollm2-135m-128k/profile.json "$out/profile.json"
    "$python" -m "$here.paper_forms.coverage" "${model[@]}" --text "$texts/calibration/sympy.txt" --tokens 131000 \
      --questions 0 --profile "$out/profile.json" | tee "$out/thresholds.out"
    for stride in 8 16; do
      "$python" -m "$here.paper_forms.minimum_threshold" "${model[@]}" --text "$texts/calibration/sympy.txt" \
        --tokens 12288 --questions 40 --method xattention_paper:stride=$stride --density 0.15 \
        --profile "$out/profile.json" | tee -a "$out/thresholds.out"
    done
    ;;
  long)
    shards "${whole[@]}" "${shipped[@]}" --tasks copies:16 needles:40 --methods \
      dpxa:$level dpxa_thesis:share=0.07 xattention:share=0.07 xattention:share=0.07,stride=16 \
      streaming streaming+delta:gamma=8 streaming+delta:gamma=16 streaming+delta \
      streaming+delta:gamma=8,spread=0 streaming+delta:gamma=64,spread=0 delta_kv delta_kv:means=0
    ;;
  long-thresholds)
    shards "${whole[@]}" --tasks copies:16 needles:40 --profile "$out/profile.json" --methods \
      "dpxa_thesis:density=$(density dpxa_thesis '' 0)" "dpxa_thesis:density=$(density dpxa_thesis '' 1)" \
      "xattention_paper:stride=8,density=$(density xattention_paper 8 0)" \
      "xattention_paper:stride=16,density=$(density xattention_paper 16 0)" xattention xattention:stride=16
    ;;
  thresholds-12288)
    shards --chunk 65536 --seed 61 --documents 21x12288 --tasks needles:20 --profile "$out/profile.json" --methods \
      "xattention_paper:stride=8,density=$(density xattention_paper 8 0)" \
      "xattention_paper:stride=16,density=$(density xattention_paper 16 0)" xattention xattention:stride=16
    ;;
  decode)
    shards "${whole[@]}" --tasks needles:6 --decode-questions 6 \
      --methods dense --decode quest:256 8,14,18,21:672 8,14,18,21:256 periodic:4:256 random:4:1:256 \
      8,14,18,21:256:4 8,14,18,21:256:16
    ;;
  served-130500) served 130500 20 needles:40 ;;
  time)
    shards "${whole[@]}" --tasks copies:16 --methods {dpxa,xattention}:share={0.03,0.06,0.12} \
      xattention:share={0.03,0.06,0.12},stride=16
    ;;
  far-131) far 131000 8e6 20 ;;
  far-262) far 262144 16.4e6 20 ;;
  far-524) far 524288 33.5e6 20 dpxa:share=0.022 ;;
  fp8) shards "${whole[@]}" "${shipped[@]}" --tasks needles:40 --quantisation fp8 --methods dpxa:$level ;;
  code) short 21 copies:8 ;;
  plays) short 37 names:8 ;;
  forms-keys)
    thesis=delta_kv_thesis:min_tokens=0 anchors=delta_kv:min_tokens=0,means=0 packed=delta_xattention:$some,means
    shards "${untuned[@]}" --methods $thesis,cos=0.88 $thesis $thesis,cos={0.8,0.78} \
      $thesis,distance={8.8,10.6,12.1} delta_kv_periodic:min_tokens=0,every=3 \
      delta_kv_random:min_tokens=0,keep=0.333 \
      $anchors $anchors,critical={128,2048} "xattention:$some" $packed={1,0} \
      $packed={1,0},exact_share=0 delta_xattention_all_packed:$some,means=0 \
      xattention_skip:$some,means=0
    ;;
  forms-tiles)
    streaming=min_tokens=0,window=768 lines=min_tokens=0,verticals=150,slashes=700
    shards "${untuned[@]}" --methods xattention:min_tokens=0 "xattention:$some" "xattention:$some,stride=4" \
      naive_cells:$some,every={3,4} xattention_paper:min_tokens=0,top={6,7} \
      minference_block_sparse:min_tokens=0,top=7 sparge:min_tokens=0 sparge:min_tokens=0,tau=0.96,theta=0.3 \
      flex:min_tokens=0,gamma_flex=0.81 vertical_slash:$lines vertical_slash+delta:$lines streaming:$streaming \
      streaming+delta:$streaming,gamma={16,32,64,128,256} streaming_smoothed:$streaming,linear=1 \
      streaming_smoothed:$streaming,alpha=0.5 \
      streaming_smoothed:$streaming,alpha=0.2,beta=0.05,acceleration=0.0035 \
      streaming_smoothed:$streaming,paper_end=1
    ;;
  forms-long)
    shards "${whole[@]}" --chunk 131072 --tasks copies:16 needles:40 --methods streaming \
      streaming+delta:gamma={32,128,256} streaming_smoothed:linear=1 streaming:sink=1024,window=4096 \
      vertical_slash vertical_slash+delta flex xattention:share=0.07 \
      delta_xattention:share=0.07,means={1,0}
    ;;
  forms-decode)
    "$python" -m "$here.paper_forms.delta_layers" "${model[@]}" --text "$texts/calibration/sympy.txt" \
      --layers 3 4 | tee "$out/delta_layers.out"
    shifted=($(awk '/^[34] Δ-layers/ {print $3}' "$out/delta_layers.out"))
    shards "${whole[@]}" --tasks needles:20 --decode-questions 20 --methods dense \
      --decode 8,14,18,21:{64,128,256,512,1024} "${shifted[0]}:256" "${shifted[1]}:256" periodic:3:256 \
      random:4:{1,2,3}:256 "${shifted[0]}:64:8"
    ;;
  *) echo "no part $part" >&2 && exit 2 ;;
esac
