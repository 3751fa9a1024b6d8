#!/usr/bin/env bash
# K/V in 8 bits on one or two GPUs of 80 GB: the kernels' tests, a token's time beside 16 bits, accuracy.
#   benchmarks/kv_fp8.sh RESULTS [tests] [kernels] [engine] [accuracy]
# All four without names. Writes RESULTS/*.json and *.out; a part that fails does not stop the others.
set -uo pipefail
results=$(realpath "$1") && shift
parts=("${@:-tests kernels engine accuracy}")
python=${PYTHON:-python3}
mkdir -p "$results"

part() { # NAME COMMAND…
  local name=$1
  shift
  [[ " ${parts[*]} " == *" $name "* ]] || return 0
  echo "== $name"
  "$@" > "$results/$name.out" 2>&1 || echo "$name failed: $results/$name.out"
  tail -n 15 "$results/$name.out"
}

# Compiled, not interpreted: where there is a CUDA device, the tests run on it.
part tests "$python" -m pytest -q tests/kernels/layers/test_kv_fp8.py tests/kernels/paged_decode
part kernels "$python" -m deltafront.benchmarks.kernels --modules cases_decode --out "$results/kernels.json" \
  --only paged_decode paged_decode_fp8 paged_decode_scores paged_decode_fp8_scores \
  paged_decode_256_pages paged_decode_fp8_256_pages
# Four sessions of 131,072 tokens of 8B take 64 GiB of K/V in 16 bits: two GPUs of 80 GB share them by heads, beside
# two stages. One GPU holds four of 32,768.
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
setup=(--decode-gpu last --tokens 32768 --decode-tokens 32768)
(( gpus < 2 )) || setup=(--decode-gpu last --tokens 131072 --decode-tokens 131072 --stages 2 --ranks 2)
part engine "$python" -m deltafront.benchmarks.engine --cases decode ttft --methods dpxa --kv-dtypes 16 fp8 \
  "${setup[@]}" --result "$results/engine.json"
part accuracy "$python" -m deltafront.benchmarks.accuracy --text deploy/demo/moby-dick.txt \
  --documents 6x32640 4x130900 --tasks needles:100 --methods dense --kv-dtype fp8 \
  --decode 8,11,14,20,21:256 --result "$results/accuracy.json"
