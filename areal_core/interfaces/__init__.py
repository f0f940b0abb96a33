"""What an engine, a workflow, a reward and an algorithm must do.

Protocols and the plain records that pass between them; no implementation. The rollout half and the training half of a
run meet only here and in `areal_core.data`.
"""

from areal_core.interfaces.algorithm import (
    Advantage,
    Aggregation,
    Algorithm,
    Correction,
    Filter,
    LossResult,
    PolicyLoss,
    PolicyTerms,
)
from areal_core.interfaces.dataset import Dataset
from areal_core.interfaces.inference import (
    BroadcastGroup,
    BroadcastReceiver,
    Generation,
    GenerationRequest,
    InferenceCapabilities,
    InferenceEngine,
    MemorySharer,
    SamplingParameters,
    TensorDescription,
    UpdateMode,
    WeightUpdate,
)
from areal_core.interfaces.launcher import Launcher, ProcessSpecification
from areal_core.interfaces.model import ModelReference, ModelSource
from areal_core.interfaces.source import BatchSource, Interrupted
from areal_core.interfaces.tracker import Tracker
from areal_core.interfaces.training import OptimizerSettings, Role, TrainEngine
from areal_core.interfaces.workflow import Environment, Reward, RewardScore, RolloutWorkflow, WorkflowContext

__all__ = [
    "Advantage",
    "Aggregation",
    "Algorithm",
    "BatchSource",
    "BroadcastGroup",
    "BroadcastReceiver",
    "Correction",
    "Dataset",
    "Environment",
    "Filter",
    "Generation",
    "GenerationRequest",
    "InferenceCapabilities",
    "InferenceEngine",
    "Interrupted",
    "Launcher",
    "LossResult",
    "MemorySharer",
    "ModelReference",
    "ModelSource",
    "OptimizerSettings",
    "PolicyLoss",
    "PolicyTerms",
    "ProcessSpecification",
    "Reward",
    "RewardScore",
    "Role",
    "RolloutWorkflow",
    "SamplingParameters",
    "TensorDescription",
    "Tracker",
    "TrainEngine",
    "UpdateMode",
    "WeightUpdate",
    "WorkflowContext",
]
