"""Models that are not plain decoders, on a GPU: which rung each family takes, and whether trainer and server agree.

    python benchmarks/gpu_families.py rungs [FAMILY...]
    python benchmarks/gpu_families.py steps --size qwen3.5-2b|gpt-oss-slice [--tiny]
    python benchmarks/gpu_families.py server --size qwen3.5-2b|gpt-oss-slice --program "python3 -m sglang.launch_server"

rungs    The tiny families of tests/models: their rung in float32 and bfloat16; the largest difference of their
         log-probabilities and gradients from transformers' in float32 on the CPU, sequence by sequence. A bfloat16
         difference is the mean.
steps    Updates on batches of new lengths: milliseconds of each, and the graphs that PyTorch has compiled until then.
server   A random model of this shape answers 32 prompts in the server. Its log-probabilities in bfloat16, the trainer's
         of the same tokens, and those of transformers alone in float32: how far each two are apart.
         Without `--program`, the servers of tests/servers_on_cpu.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_train_step import loss_of
from gpu_train_step_sizes import HYBRIDS, SINKS, make_config
from labels import make_engine, served
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from areal_core.data import PackedBatch, Ragged
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, LossSpec
from areal_core.servers import GenerationRequest, SamplingParameters
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine

if TYPE_CHECKING:
    from types import ModuleType

    from areal_core.data import Generation

MODELS = Path(__file__).parent.parent / "tests" / "models" / "small_models.py"
PROMPTS, PROMPT = 32, 64
SPREAD = 3.0
"""Factor of the head of a random model, so that its log-probabilities differ from token to token."""


def load_small_models() -> ModuleType:
    """The families of tests/models."""
    specification = importlib.util.spec_from_file_location(MODELS.stem, MODELS)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[MODELS.stem] = module
    specification.loader.exec_module(module)
    return module


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def rungs(families: list[str]) -> None:
    """Print a line for each family."""
    torch.backends.cudnn.allow_tf32 = False  # transformers' convolutions would round to 10 bits
    models = load_small_models()
    batch = models.make_batch()
    for family in families or models.FAMILIES:
        words = [f"{family:<22}"]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            models.make_model(family, folder)
            wanted, wanted_gradients = models.reference(folder, batch)
            for dtype in ("float32", "bfloat16"):
                try:
                    engine = models.set_up(folder, dtype, compile=False)
                except RunError as error:
                    words.append(f"{dtype} refused: {str(error).splitlines()[0]}")
                    continue
                try:
                    values = engine.forward(batch, ["logprobs"])["logprobs"].cpu()
                    rung = engine._choice.rung
                    if dtype == "bfloat16":
                        words.append(f"{dtype} {rung} {float((values - wanted).abs().mean()):.1e}")
                        continue
                    largest = max(float(gradient.abs().max()) for gradient in wanted_gradients.values())
                    found = {name: gradient.cpu() for name, gradient in models.gradients(engine, batch).items()}
                    of_gradients = max(
                        float((found.get(name, torch.zeros_like(gradient)) - gradient).abs().max()) / largest
                        for name, gradient in wanted_gradients.items()
                    )
                    words.append(f"{dtype} {rung} {models.distance(values, wanted):.1e} {of_gradients:.1e}")
                except Exception as error:  # noqa: BLE001 - shown, and the next one may work
                    words.append(f"{dtype} {type(error).__name__}: {str(error).splitlines()[0]}")
                finally:
                    engine.close()
        say(" | ".join(words))


def make_model(size: str, folder: Path, *, tiny: bool) -> None:
    """Write a random model in bfloat16 whose log-probabilities and sinks vary."""
    torch.manual_seed(0)
    config = make_config(size, tiny=tiny)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(SPREAD)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(1.0, 1.0)
    if size in HYBRIDS:  # published configs have it, transformers reads layer_types, and SGLang reads this
        model.config.full_attention_interval = 4
    model.save_pretrained(folder)


def set_up(folder: Path, tokens: int) -> FSDPEngine:
    """The train engine with that model, in bfloat16."""
    engine = FSDPEngine(FSDPConfig(learning_rate=1e-6, max_tokens_per_microbatch=tokens))
    engine.setup(ModelReference(str(folder), "bfloat16"), ACTOR, OptimizerSettings(1000, 1.0))
    assert engine._choice is not None
    say(f"computed as: {engine._choice.rung}; {'; '.join(engine._choice.reasons)}")
    return engine


def steps(size: str, *, tiny: bool, count: int = 12) -> None:
    """Updates on random batches of 8 to 24 sequences."""
    with tempfile.TemporaryDirectory() as name:
        make_model(size, Path(name), tiny=tiny)
        engine = set_up(Path(name), 512 if tiny else 16384)
        vocabulary = make_config(size, tiny=tiny).vocab_size
        generator = torch.Generator().manual_seed(2)
        for number in range(count):
            rows = int(torch.randint(8, 25, (), generator=generator))
            lengths = torch.randint(4, 20 if tiny else 1200, (rows,), generator=generator)
            total = int(lengths.sum())
            columns = {
                key: torch.randint(vocabulary, (total,), generator=generator) for key in ("input_ids", "targets")
            }
            columns["advantages"] = torch.randn(total, generator=generator)
            batch = PackedBatch(Ragged(lengths, columns))
            start = time.perf_counter()
            engine.forward(batch, ["logprobs"])
            engine.train([LossSpec("actor", batch, ["logprobs", "entropy"], loss_of(total, 0.0))])
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            milliseconds = 1000 * (time.perf_counter() - start)
            say(f"step {number}: {rows} sequences, {total} tokens, {milliseconds:.0f} ms, {graphs} graphs so far")
        engine.close()


async def answers(
    arguments: argparse.Namespace, settings: Any, folder: Path, prompts: list[list[int]]
) -> list[Generation]:
    """What a server that runs answers to prompts at temperature 1."""
    with tempfile.TemporaryDirectory() as work:
        engine = make_engine(arguments, settings, Path(work))
        try:
            await engine.start(ModelReference(str(folder), arguments.dtype))
            sampling = SamplingParameters(temperature=1.0, max_new_tokens=arguments.tokens)
            asked = [GenerationRequest(f"prompt-{n}", ids, sampling, n) for n, ids in enumerate(prompts)]
            return await asyncio.gather(*map(engine.generate, asked))
        finally:
            await engine.close()


@torch.no_grad()
def transformers_logprobs(folder: Path, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probabilities of each token's successor, by transformers alone in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(device)
    found = []
    for ids in sequences:
        scores = torch.log_softmax(model(input_ids=ids[None].to(device), use_cache=False).logits[0], -1).cpu()
        found.append(scores.gather(1, ids.roll(-1)[:, None])[:, 0])
    return found


def server(arguments: argparse.Namespace) -> None:
    """Print how far trainer and server are apart."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(arguments.size, folder, tiny=arguments.tiny)
        vocabulary = make_config(arguments.size, tiny=arguments.tiny).vocab_size
        generator = torch.Generator().manual_seed(3)
        prompts = torch.randint(vocabulary, (PROMPTS, PROMPT), generator=generator).tolist()
        with tempfile.TemporaryDirectory() as work, served(arguments, folder, Path(work)) as settings:
            found = asyncio.run(answers(arguments, settings, folder, prompts))
        ids = [torch.tensor(prompt + one.output_ids) for prompt, one in zip(prompts, found, strict=True)]
        columns = {"input_ids": torch.cat(ids), "targets": torch.cat([each.roll(-1) for each in ids])}
        batch = PackedBatch(Ragged(torch.tensor([len(each) for each in ids]), columns))
        engine = set_up(folder, 8192)
        rows = engine.forward(batch, ["logprobs"])["logprobs"].cpu().split([len(each) for each in ids])
        engine.close()
        exact = transformers_logprobs(folder, ids)
    own, right = (torch.cat([row[PROMPT - 1 : -1] for row in each]) for each in (rows, exact))
    answered = torch.cat([torch.tensor(one.logprobs) for one in found])
    least, most = float(answered.min()), float(answered.max())
    say(f"{arguments.engine}, {arguments.size}: {len(answered)} tokens, log-probabilities {least:.1f} to {most:.1f}")
    for name, one, other in (
        ("trainer and server", own, answered),
        ("trainer and transformers in float32", own, right),
        ("server and transformers in float32", answered, right),
    ):
        apart = one - other
        mean, bias, largest = (float(each) for each in (apart.abs().mean(), apart.mean(), apart.abs().max()))
        say(f"  {name} differ by {mean:.4f} in the mean, bias {bias:+.5f}, largest {largest:.3f}")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("rungs", "steps", "server"))
    parser.add_argument("families", nargs="*")
    parser.add_argument("--size", choices=[*HYBRIDS, *SINKS], default="qwen3.5-2b")
    parser.add_argument("--tiny", action="store_true", help="try the script itself, on any machine")
    parser.add_argument("--engine", choices=("hf", "sglang", "vllm"), default="sglang")
    parser.add_argument("--program", default="", help="that starts the server")
    parser.add_argument("--options", default="{}", help="of the server, as JSON")
    parser.add_argument("--device", default="auto", help="of the embedded engine")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.set_defaults(mode="recompute", slots=PROMPTS, partial_generations=False)
    arguments = parser.parse_args()
    disable_progress_bar()
    if arguments.part == "rungs":
        rungs(arguments.families)
    elif arguments.part == "steps":
        steps(arguments.size, tiny=arguments.tiny)
    else:
        server(arguments)


if __name__ == "__main__":
    main()
