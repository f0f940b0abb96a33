"""A drop-in for TRL: change one import of a script, and areal runs it.

from areal_core.trl import GRPOConfig, GRPOTrainer

    GRPOConfig    `arguments.py`  TRL's names and defaults, sorted by what areal does with them
    mapping       `mapping.py`    from them to a config of areal; everything that cannot be honored, in one error
    GRPOTrainer   `trainer.py`    TRL's methods, on a `Run`
    rewards       `reward.py`     TRL's functions, which take lists, as rewards of areal, which take one answer

TRL need not be installed. Names and defaults are those of TRL 1.16.
"""

from areal_core.trl.arguments import GRPOConfig
from areal_core.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
