"""`versions.md`: which versions resolve together, and what ran with them, from `release/versions`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml

import areal_core

VERSIONS: Final = Path(__file__).parents[2] / "release" / "versions"
SHOWN: Final = {"sglang": "SGLang", "vllm": "vLLM", "torch": "PyTorch", "transformers": "transformers"}
INTRODUCTION: Final = f"""# Versions

areal {areal_core.__version__} runs on Python 3.11 to 3.13 and PyTorch 2.9 or newer. With a server, take a row of this
table: each was resolved as a whole for Linux with CUDA 13 and Python 3.12 (glibc 2.34 or newer), its lock file holds
every version, and the last columns say what ran. All rows ran on GPUs; the third ran the longest. `areal doctor`
compares server, PyTorch and transformers."""
COMMANDS: Final = """## Install a row

Run one of these in a clone, in an empty environment. pip and `uv pip install` take the lock file as constraints, also
for further plugins. Without a clone, take the lock file from the repository, and `areal-core areal-hf ...` for the
folders:

```
pip install -c release/versions/sglang.txt . \\
  "./plugins/areal_sglang[engine]" ./plugins/areal_{hf,fsdp,grpo,view} "./plugins/areal_rewards[datasets,math]"
pip install -c release/versions/vllm.txt . \\
  "./plugins/areal_vllm[engine]" ./plugins/areal_{hf,fsdp,grpo,view} "./plugins/areal_rewards[datasets,math]"
```

SGLang before 0.5.22 needs an older transformers than `areal-hf`, so the server gets an environment of its own, which
the config names:

```
pip install -c release/versions/trainer.txt . ./plugins/areal_{sglang,hf,fsdp,grpo,view} \\
  "./plugins/areal_rewards[datasets,math]"
python3.12 -m venv /envs/sglang && /envs/sglang/bin/pip install -r release/versions/sglang-server.txt
```

```yaml
inference_engine: {type: sglang, program: [/envs/sglang/bin/python, -m, sglang.launch_server]}
```

[One Dockerfile](../../release/Dockerfile) makes an image of each row; its first lines say how. It has not been built
yet: no Docker engine runs where areal is developed."""


def page() -> str:
    """The whole page."""
    rows = [
        "| row | server | PyTorch | transformers | resolved | on a CPU | on GPUs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in yaml.safe_load((VERSIONS / "rows.yaml").read_text(encoding="utf-8")).values():
        locks = {name: pins(name) for name in row["environments"]}
        server = next(
            f"{SHOWN[name]} {lock[name]}" for lock in locks.values() for name in ("sglang", "vllm") if name in lock
        )
        cells = [row["title"], server, *(", ".join(_each(locks, name)) for name in ("torch", "transformers"))]
        resolved = [f"[{len(lock)} distributions](../../release/versions/{name}.txt)" for name, lock in locks.items()]
        rows.append(f"| {' | '.join([*cells, ', '.join(resolved), row['cpu'], row['gpu']])} |")
    return "\n\n".join([INTRODUCTION, "\n".join(rows), COMMANDS])


def pins(environment: str) -> dict[str, str]:
    """What a lock file pins, by name."""
    lines = (VERSIONS / f"{environment}.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(";")[0].partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip(): version.strip() for name, _, version in pairs}


def _each(locks: dict[str, dict[str, str]], name: str) -> list[str]:
    """A version where all environments have the same, else each with its environment."""
    found = {environment: lock[name] for environment, lock in locks.items() if name in lock}
    if len(set(found.values())) == 1:
        return [next(iter(found.values()))]
    return [f"{version} ({environment})" for environment, version in found.items()]
