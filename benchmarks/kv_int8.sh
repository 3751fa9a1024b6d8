#!/usr/bin/env bash
# K/V in 8 bits on one GPU of 80 GB: the kernels' tests, their time and a token's beside 16 bits, accuracy.
#   benchmarks/kv_int8.sh RESULTS TEXTS [tests] [kernels] [tokens] [accuracy]
# All four without names. TEXTS is a folder that this has written, where there are packages:
#   python -m deltafront.benchmarks.accuracy.sources TEXTS --packages mypy networkx numpy pydantic rich transformers
# Writes RESULTS/*.json and *.out; a part that fails does not stop the others.
set -uo pipefail
mkdir -p "$1"
results=$(realpath "$1") texts=$(realpath "$2")
shift 2
parts=("${@:-tests kernels tokens accuracy}")
python=${PYTHON:-python3}

part() { # NAME COMMAND…
  local name=$1 began=$SECONDS
  shift
  [[ " ${parts[*]} " == *" $name "* ]] || return 0
  "$@" > "$results/$name.out" 2>&1 || echo "$name failed: $results/$name.out"
  echo "== $name: $((SECONDS - began)) s"
  tail -n 20 "$results/$name.out"
}

# Compiled, not interpreted: where there is a CUDA device, the tests run on it.
part tests "$python" -m pytest -q tests/kernels/layers/test_kv_int8.py tests/kernels/paged_decode
part kernels "$python" -m deltafront.benchmarks.kernels --modules cases_decode --out "$results/kernels.json" \
  --only paged_decode paged_decode_int8 paged_decode_scores paged_decode_int8_scores \
  paged_decode_256_pages paged_decode_int8_256_pages
# Four requests of 131,072 tokens of 8B take 64 GiB of K/V in 16 bits, so weights are in 8.
part tokens "$python" -m deltafront.benchmarks.decode_alone --quantisation fp8 --result "$results/engine.json"
part accuracy "$python" -m deltafront.benchmarks.accuracy \
  --text "$texts"/{mypy,networkx,numpy,pydantic,rich,transformers}.txt --documents 4x130900 6x32640 \
  --tasks needles:60 --methods dense --kv-dtype int8 --decode 8,11,14,20,21:256 \
  --result "$results/accuracy_kv_int8_h100.json"
