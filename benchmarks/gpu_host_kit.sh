#!/usr/bin/env bash
# What a Hopper GPU host that reaches no registry needs for the newest SGLang or vLLM: the server, PyTorch, Triton and
# NCCL of release/versions/*.txt, pruned to sm_90. CUDA's libraries are the host's own.
#
#   benchmarks/gpu_host_kit.sh make sglang|vllm FOLDER     with a network: archives in FOLDER, in parts of PARTS MB (55)
#   benchmarks/gpu_host_kit.sh make trl FOLDER             TRL with its own vLLM, on the PyTorch 2.11 of the host
#   benchmarks/gpu_host_kit.sh unpack FOLDER SITE          on the host: a folder of packages, and SITE/python
#
# SITE/python is the host's python3 with SITE and with the areal of this clone. areal's plugins are found by their
# metadata: `pip install --no-deps` this clone and its plugins on the host, or put their *.dist-info folders into SITE.
# The host has Python 3.12 with its headers, CUDA 13's libraries as wheels (PyTorch for CUDA 13 brings them), nvcc and
# ptxas 13 in CUDA_HOME (/usr/local/cuda), gcc, aiohttp, pytest and the smaller requirements of transformers.
# `make` needs zstd, which it puts into FOLDER/zstd for hosts without it, and 10 GB of disk.
set -euo pipefail
cd "$(dirname "$0")/.."
torch_leaves_out=(torch/include/ torch/share/ torch/test/ bin/protoc triton/backends/nvidia/bin/ lib/cupti libproton
    triton/instrumentation triton/plugins triton/FileCheck triton/_C/include)
server_leaves_out=(flash_ops infllm_ops flashmla_ops sgl_kernel/sm100/ triton_kernels/ fa2_C third_party/deep_gemm/
    vllm-rs _flashmla fmha_sm100 swagger-ui _qutlass _flashkda _deepselect sglang/multimodal_gen
    rust_extensions/_bench rust_extensions/_grpc data/csrc/cake_ data/csrc/kda/ data/csrc/fused_moe/ data/csrc/gdn/
    data/csrc/experimental/ data/cutlass/examples/ data/cutlass/test/ data/cutlass/python/
    data/cutlass/tools/library/ data/cutlass/tools/profiler/ data/tekken /tests/ /locales/)
both=(transformers tokenizers compressed-tensors xgrammar apache-tvm-ffi pydantic pydantic-core annotated-types
    annotated-doc typing-inspection fastapi starlette uvicorn httptools python-multipart pybase64 pyzmq msgspec
    msgpack setproctitle dill loguru openai anthropic httpx2 httpcore2 sniffio jiter docstring-parser
    partial-json-parser jsonschema jsonschema-specifications referencing rpds-py interegular llguidance watchfiles
    pluggy torchvision opentelemetry-api)
sglang=(sglang sglang-kernel flashinfer-python nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base
    nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu13 quack-kernels torch-memory-saver gguf orjson ipython
    traitlets distro soundfile cffi pycparser zstandard easydict openai-harmony)
vllm=(vllm mistral-common pydantic-extra-types pydantic-settings python-dotenv pycountry blake3 cachetools cbor2 depyf
    astor multiprocess ijson lark lm-format-enforcer mcp mcp-types sse-starlette model-hosting-container-standards
    jmespath supervisor nvtx oss-harmony outlines-core prometheus-fastapi-instrumentator python-json-logger
    agent-detector)
# All that the host lacks of benchmarks/trl_on_host.txt, but for kernels that are not used here.
trl=(trl vllm datasets agent-detector annotated-types anthropic apache-tvm-ffi astor blake3 cachetools cbor2
    compressed-tensors depyf dill dnspython docstring-parser email-validator fastapi fastsafetensors httpcore2 httptools
    httpx2 ijson interegular jiter jmespath jsonschema jsonschema-specifications lark llguidance lm-format-enforcer
    loguru mcp mcp-types mistral-common model-hosting-container-standards msgspec multiprocess nvtx openai
    openai-harmony opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions
    opentelemetry-semantic-conventions-ai outlines-core partial-json-parser prometheus-fastapi-instrumentator pybase64
    pycountry pydantic pydantic-core pydantic-extra-types pydantic-settings pyjwt python-dotenv python-json-logger
    python-multipart pyzmq referencing rpds-py setproctitle sniffio sse-starlette starlette supervisor truststore
    typing-inspection tzdata uvicorn watchfiles websockets xgrammar)

make_kit() { # ENGINE FOLDER
    local -n distributions=$1
    local lock=release/versions/$1.txt words=(--arch 90 --no-ptx --no-symbols --parts "${PARTS:-55}") more=("${both[@]}")
    mkdir -p "$2"
    if [ "$1" = trl ]; then
        lock=benchmarks/trl_on_host.txt more=()
    else
        python3 benchmarks/offline_site.py "$2/torch.tar.zst" torch triton nvidia-nccl-cu13 "${words[@]}" \
            --constraint "$lock" --leave-out "${torch_leaves_out[@]}"
    fi
    python3 benchmarks/offline_site.py "$2/server.tar.zst" "${distributions[@]}" "${more[@]}" "${words[@]}" \
        --constraint "$lock" --leave-out "${server_leaves_out[@]}"
    mkdir -p "$2/zstd"
    ldd "$(command -v zstd)" | awk '/=> \// && !/lib(c|m|pthread)\.so/ { print $3 }' | xargs cp -t "$2/zstd" "$(command -v zstd)"
}

unpack() { # FOLDER SITE
    local site folder cuda=${CUDA_HOME:-/usr/local/cuda} clone=$PWD name host
    folder=$(realpath -- "$1") site=$(realpath -m -- "$2")
    mkdir -p "$site"
    local -a zstd=(zstd)
    command -v zstd > /dev/null || zstd=(env "LD_LIBRARY_PATH=$folder/zstd" "$folder/zstd/zstd")
    for name in torch server; do
        ls "$folder/$name".tar.zst.?? > /dev/null 2>&1 || continue
        cat "$folder/$name".tar.zst.?? | "${zstd[@]}" -dcq | tar -C "$site" -xf -
    done
    if [ -d "$site/torch" ]; then
        mkdir -p "$site/nvidia" "$site/triton/backends/nvidia/bin"
        # PyTorch looks for CUDA's libraries beside itself.
        host=$(python3 -c "import site; print(site.getsitepackages()[0])")/nvidia
        for name in "$host"/*; do
            [ -e "$site/nvidia/$(basename "$name")" ] || [ ! -e "$name" ] || ln -s "$name" "$site/nvidia/"
        done
        for name in ptxas nvdisasm cuobjdump; do ln -sf "$cuda/bin/$name" "$site/triton/backends/nvidia/bin/"; done
    fi
    # areal starts vLLM with its worker module on PYTHONPATH: keep what the caller has there.
    cat > "$site/python" << END
#!/bin/bash
path=$clone:$(printf '%s:' "$clone"/plugins/*/src)$site:$site/nvidia_cutlass_dsl/dsl_packages
export PYTHONPATH=\$path\${PYTHONPATH:+:\$PYTHONPATH}
# The host's cuDNN may be older than the one that PyTorch was built with.
export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 FLASHINFER_DISABLE_VERSION_CHECK=1
export TRITON_PTXAS_PATH=$cuda/bin/ptxas CUDA_HOME=$cuda PATH=$cuda/bin:\$PATH HF_HUB_OFFLINE=1
exec python3 "\$@"
END
    chmod +x "$site/python"
    python3 -m compileall -q -j "$(nproc)" "$site" > /dev/null || true # some files are templates
    "$site/python" -c "import torch; print(torch.__version__, torch.cuda.get_device_name(), torch.cuda.nccl.version())"
}

case ${1:-}/$# in
make/3)
    case $2 in sglang | vllm | trl) make_kit "$2" "$3" ;; *) echo "sglang, vllm or trl, not $2" >&2 && exit 2 ;; esac
    ;;
unpack/3) unpack "$2" "$3" ;;
*) sed -n '/^# /s/^# //p; /^set/q' "$0" >&2 && exit 2 ;;
esac
