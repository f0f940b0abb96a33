"""Learns and generates text in a process without areal-vision: without_vision_program.py TEXT_MODEL VLM."""

import sys

from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR
from areal_deepspeed import config  # noqa: F401 - imports what it needs
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_hf.limits import Limits
from areal_hf.scheduler import Scheduler
from areal_hf.server import load_model
from areal_testing.conformance.training_session import OUTPUTS, make_training_batch, policy_loss, train
from areal_vllm import adapter  # noqa: F401 - as above


def learn(folder):
    engine = FSDPEngine(FSDPConfig())
    engine.setup(ModelReference(folder, "float32"), ACTOR, OptimizerSettings(total_updates=2, temperature=1.0))
    batch = make_training_batch()
    train(
        engine,
        batch.with_tokens(input_ids=batch["input_ids"] % 30, targets=batch["targets"] % 30),
        policy_loss,
        OUTPUTS,
    )
    engine.close()


def generate(folder):
    model = load_model(ModelReference(folder), "cpu")
    limits = Limits(requests=1, sequence_length=64, cache_bytes=1 << 20, prefill_tokens=64)
    Scheduler(model, limits, recompute=False)


text, vlm = sys.argv[2:]
for use in (learn, generate):
    use(text)
    use(vlm)
