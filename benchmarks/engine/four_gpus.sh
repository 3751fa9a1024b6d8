#!/usr/bin/env bash
# The rows of four GPUs: four stages, then one stage and two stages side by side, then two groups of two.
#   benchmarks/engine/four_gpus.sh RESULTS [dense dpxa]
# Writes RESULTS/*.json and *.out. Services that run side by side have the same ports, so each gets a network
# and a /tmp/ray of its own: that needs root. About four minutes with dpxa alone, two more for each dense row.
set -euo pipefail
results=$(realpath "$1") && shift
methods=("${@:-dpxa}")
model=/dev/shm/deltafront-four-gpus
engine=(python3 -m deltafront.benchmarks.engine --methods "${methods[@]}" --repeats 3)
longest=(--tokens 131072 524288)
# Of 8B: two prompts in prefill and three in decode beside each other on a GPU.
together=(--tokens 131072 --stages 2 --decode-gpu last --set prefill.cache_tokens=262144 decode.cache_tokens=405504)
loopback='import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 0x49))  # SIOCSIFFLAGS: up and running'

alone() { # NAME GPUS COMMAND…
  local name=$1 gpus=$2
  shift 2
  mkdir -p /tmp/ray "/tmp/ray-$name"
  CUDA_VISIBLE_DEVICES=$gpus NCCL_SOCKET_IFNAME=lo unshare --net --mount bash -c '
    python3 -c "$0" && mount --bind "$1" /tmp/ray && shift && "$@"' "$loopback" "/tmp/ray-$name" "$@" \
    > "$results/$name.out" 2>&1
}

mkdir -p "$results"
# One length of position for each directory: config.json is written anew where it differs.
python3 - "$model" <<'PYTHON'
import sys
from dataclasses import replace
from pathlib import Path

import torch

from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.benchmarks.engine.setup import ANSWER_ROOM

shape = replace(SHAPES["8b"], positions=524_288 + ANSWER_ROOM)
write_model(Path(sys.argv[1]), shape, torch.device("cuda"))
PYTHON
mkdir -p "$model-short"
ln -sf "$model"/*.safetensors "$model-short/"
cp "$model"/*.json "$model-short/"

alone four 0,1,2,3 "${engine[@]}" --model "$model" --stages 4 --decode-gpu last "${longest[@]}" --cases ttft \
  --row-s 8 --result "$results/four.json"
alone one 0,1 "${engine[@]}" --model "$model" --stages 1 --chunk 8192 "${longest[@]}" --cases ttft \
  --row-s 8 --result "$results/one.json" &
one=$!
alone two 2,3 "${engine[@]}" --model "$model-short" "${together[@]}" --cases ttft throughput \
  --row-s 8 --result "$results/two.json" &
two=$!
wait "$one"
wait "$two"
alone groups 0,1,2,3 "${engine[@]}" --model "$model-short" --groups 2 "${together[@]}" decode.workers=2 \
  --cases throughput --result "$results/groups.json"
tail -n 6 "$results"/*.out
