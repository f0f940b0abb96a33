"""Which SDKs and agent libraries are trained as they are: programs of each, unchanged, in short true runs.

    python benchmarks/agent_libraries.py [NAME ...] [--fresh] [--here] [--keep DIR]

Each library has a virtual environment of its own below `~/.cache/areal/agents`, made once (`--fresh` makes it anew, and
`--here` takes this Python), and a program in `examples/agents/libraries`. It is run twice by `areal run`: with a model
of random weights, which says anything, and with answers that a script gives (`benchmarks/scripted_engine.py`), so that
it is seen to call its tools. Both train on what was said, without staleness: exact tokens are those whose
log-probabilities the trainer computes as the engine reported them, and as many as were said. `areal audit` must find
each run clean.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE.parent / "examples" / "agents" / "libraries"
CACHE = Path(os.environ.get("AREAL_CACHE") or Path.home() / ".cache" / "areal") / "agents"
COMPLETE = "complete.json"
"""Written into an environment as the last thing: what was asked for."""
STEPS, BATCH, GROUP = 2, 2, 2
EXACT = 1e-3
"""Nats by which an engine and a trainer in float32 may differ at one token, in the mean: docs/reference/metrics.md."""

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": {a}, "b": {b}}}\n</tool_call>'
TOOL_LOOP = [["<result>", "{sum}"], ["", f"I add.\n{ADD}"]]
HAND_OVER = '<tool_call>\n{"name": "transfer_to_adder", "arguments": {}}\n</tool_call>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "{sum}"}}\n</tool_call>'
CODE = "Thought: I add.\n<code>\nfinal_answer(add({a}, {b}))\n</code>"


@dataclass(frozen=True)
class Library:
    """One row of the table.

    Attributes:
        packages: that are installed; the first is the one whose version is told.
        script: see `ScriptedEngine`.
        folder: of its environment, where it shares one.
        variables: that its program needs beside the endpoint's.
        remark: for the table.
    """

    packages: tuple[str, ...]
    script: list[list[str]] = field(default_factory=lambda: TOOL_LOOP)
    folder: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    remark: str = ""


LIBRARIES = {
    "openai": Library(("openai>=3",), remark="its own loop"),
    "openai_responses": Library(("openai>=3",), folder="openai", remark="`previous_response_id`"),
    "anthropic": Library(("anthropic>=2",), remark="its own loop"),
    "openai_agents": Library(
        ("openai-agents>=0.24",),
        [['<result>{"assistant"', ADD], ["Hand sums over.", HAND_OVER], *TOOL_LOOP],
        remark="with a hand-over: another system prompt and other tools are another conversation",
    ),
    "smolagents_tools": Library(
        ("smolagents[openai]",),
        [["Observation", FINAL], ["", ADD]],
        folder="smolagents",
        remark="writes calls anew as text: each turn is a conversation of its own",
    ),
    "smolagents_code": Library(("smolagents[openai]",), [["", CODE]], folder="smolagents", remark="calls in Python"),
    "langchain": Library(("langchain-openai", "langgraph"), remark="`create_react_agent`"),
    "pydantic_ai": Library(
        ("pydantic-ai-slim[openai]",),
        [["<result>", "{sum}"], ["", ADD]],
        remark="by both protocols; `run_stream` takes a text beside a call for the answer",
    ),
    "litellm": Library(("litellm", "mcp>=2"), variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"}),
    "ag2": Library(("ag2[openai]",)),
    "openai_node": Library(("openai",), remark="`runTools`, on Node"),
}
CHAT_TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }} Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' %}<result>{{ message.content }}</result>{% else %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_environment(name: str, library: Library, *, fresh: bool) -> Path:
    """The folder of a library's environment, made if it is not there.

    Raises:
        subprocess.CalledProcessError: pip or npm cannot install it; they have said why.
    """
    folder, wanted = CACHE / (library.folder or name), json.dumps(library.packages)
    done = folder / COMPLETE
    if done.is_file() and done.read_text() == wanted and not fresh:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    log(f"making {folder}")
    if is_node(name):
        folder.mkdir(parents=True)
        npm = ["npm", "install", "--no-fund", "--no-audit", "--loglevel=error", *library.packages]
        subprocess.run(npm, cwd=folder, check=True, stdout=sys.stderr, timeout=600)
    else:
        venv.create(folder, with_pip=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *library.packages], check=True, stdout=sys.stderr, timeout=1800)
    done.write_text(wanted)
    return folder


def is_node(name: str) -> bool:
    """Whether a program is for Node and not for Python."""
    return (PROGRAMS / f"{name}_program.mjs").is_file()


def version(name: str, library: Library, folder: Path) -> str:
    """Of a library, as it is installed."""
    if is_node(name):
        return str(json.loads((folder / "node_modules" / library.packages[0] / "package.json").read_text())["version"])
    package = library.packages[0].partition("[")[0].partition(">")[0]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    python = folder / "bin" / "python"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, timeout=300).stdout.strip()


def make_model(folder: Path) -> Path:
    """A model of random weights with a tokenizer of two thousand pieces of English, and a template that knows tools."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    pieces = Tokenizer(BPE(unk_token=None))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    pieces.train([str(path) for path in sorted((HERE.parent / "docs").rglob("*.md"))], trainer)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, chat_template=CHAT_TEMPLATE, **special)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_hidden_layers=2, num_key_value_heads=1, max_position_embeddings=32768,
        tie_word_embeddings=True, **sizes, **ends,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():  # so that what stands before a token matters
        parameter.data *= 3.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(name: str, library: Library, folder: Path, model: Path, run_dir: Path, *, scripted: bool) -> dict[str, Any]:
    """One run; its figures, or `error`."""
    program, command = PROGRAMS / f"{name}_program.py", [str(folder / "bin" / "python")]
    if is_node(name):
        program, command = program.with_suffix(".mjs"), ["node"]
    agent = {"type": "command", "command": [*command, str(program)], "folder": str(folder)}
    agent["environment"] = {"HOME": str(run_dir.parent), "no_proxy": "127.0.0.1", **library.variables}
    engine: dict[str, Any] = {"type": "hf"}
    if scripted:
        engine = {"type": f"{HERE / 'scripted_engine.py'}:ScriptedEngine", "rules": library.script}
    workflow = {"type": "agents/agent", "agent": agent, "max_tokens": 16000}
    words = [
        f"run_dir={run_dir}", f"steps={STEPS}", f"model.path={model}", "dataset=grpo/additions",
        f"workflow={json.dumps(workflow)}", "rewards=[grpo/right_result]",
        f"sampling.max_new_tokens={200 if scripted else 16}", f"rollout.batch_size={BATCH}",
        f"rollout.group_size={GROUP}", "rollout.max_staleness=0", "rollout.max_pending_batches=1",
        f"inference_engine={json.dumps(engine)}", "train_engine={type: fsdp/fsdp, learning_rate: 1e-3}",
        "algorithm=grpo", "evaluation=null",
    ]  # fmt: skip
    config = run_dir.with_suffix(".yaml")
    config.write_text("plugins: [grpo, hf, fsdp, agents]\n")
    areal = [sys.executable, "-m", "areal_core"]
    done = subprocess.run([*areal, "run", config, *words], capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        log("\n".join(lines[-40:]))
        return {"error": next((line for line in reversed(lines) if re.match(r"\S*Error\b", line)), lines[-1])}
    audit = subprocess.run([*areal, "audit", run_dir], capture_output=True, text=True, timeout=300, check=False)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return figures([line for line in lines if "batch/tokens" in line]) | {"clean": audit.returncode == 0}


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the steps of a run, and sums where something was counted by step."""

    def mean(key: str) -> float:
        return sum(line.get(key, 0.0) for line in lines) / len(lines)

    found = {key: mean(key) for key in lines[-1] if key.startswith("agents/")}
    found["reward"] = mean("reward/mean")
    found["episodes"] = len(lines) * BATCH * GROUP
    found["trained"] = round(sum(line["batch/sampled_tokens"] for line in lines))
    found["said"] = round(sum(line.get("scripted/tokens", 0.0) for line in lines))
    found["difference"] = max(line["train/behavior_difference"] for line in lines)
    return found


def row(name: str, library: Library, release: str, free: dict[str, Any], told: dict[str, Any]) -> str:
    """Of the table."""
    package = library.packages[0].partition(">")[0]
    for found in (free, told):
        if "error" in found:
            return f"| {package} | {release} | did not run: {found['error']} | | | | | | |"
    paths = {"chat": "chat_requests", "responses": "responses_requests", "messages": "messages_requests"}
    asked = ", ".join(f"{path} {told[f'agents/{key}']:.3g}" for path, key in paths.items() if told[f"agents/{key}"])
    exact = told["said"] == told["trained"] and max(free["difference"], told["difference"]) < EXACT
    is_exact = "yes" if exact and free["clean"] and told["clean"] else "NO"
    counted = f"{told['trained']:,} of {told['said']:,}; {max(free['difference'], told['difference']):.0e}"
    return (
        f"| {package} | {release} | {asked} | {told['agents/calls']:.3g} | {told['agents/streamed_requests']:.3g} | "
        f"{free['episodes']} + {told['episodes']} | {told['agents/conversations']:.3g} | {is_exact} ({counted}) | "
        f"{library.remark} |"
    )


def log(text: str) -> None:
    """Progress, to stderr: stdout holds the table alone."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> int:
    """Print the table; 1 if a program did not run, its tokens were not exact or an audit not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LIBRARIES)}; all by default")
    parser.add_argument("--fresh", action="store_true", help="make the environments anew")
    parser.add_argument("--here", action="store_true", help="take this Python in place of environments of their own")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which are deleted otherwise")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(LIBRARIES):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(LIBRARIES)}")
    rows, fresh = [], set()
    print("| library | version | asked, an episode | calls | streamed | episodes | conversations | exact tokens | |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        base = (arguments.keep or Path(temporary)).absolute()
        base.mkdir(parents=True, exist_ok=True)
        model = make_model(base / "model")
        for name in arguments.names or LIBRARIES:
            library = LIBRARIES[name]
            shared = library.folder or name
            folder = Path(sys.prefix)
            if not arguments.here:
                folder = make_environment(name, library, fresh=arguments.fresh and shared not in fresh)
            fresh.add(shared)
            results = []
            for scripted in (False, True):
                run_dir = base / f"{name}-{'scripted' if scripted else 'free'}"
                results.append(train(name, library, folder, model, run_dir, scripted=scripted))
                log(f"{run_dir.name}: {json.dumps(results[-1], indent=1)}")
            rows.append(row(name, library, version(name, library, folder), *results))
            print(rows[-1], flush=True)
    return int(any("| NO" in line or "did not run" in line for line in rows))


if __name__ == "__main__":
    sys.exit(main())
