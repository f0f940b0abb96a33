"""Messages between the controller, the trainer, the rollout workers, the reward workers and `areal serve`.

Each module holds one conversation: `rollouts` (trainer and rollout controller), `workflows` (rollout controller and
rollout workers), `scores` (reward pool and reward workers), `servers` (`areal serve` and the rollout controller). The
messages between the driver and every process are in `areal_core.runtime.messages`; `areal_core.runtime.frames` defines
how a message is encoded.
"""
