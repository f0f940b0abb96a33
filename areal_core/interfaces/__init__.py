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
    GenerationRequest,
    InferenceCapabilities,
    InferenceEngine,
    MemorySharer,
    Questioned,
    SamplingParameters,
    TensorDescription,
    UpdateMode,
    WeightUpdate,
)
from areal_core.interfaces.launcher import (
    EndMeans,
    Launcher,
    Needs,
    ProcessEnd,
    Processes,
    ProcessSpecification,
    RunningProcess,
)
from areal_core.interfaces.model import ModelReference, ModelSource
from areal_core.interfaces.tracker import Tracker
from areal_core.interfaces.training import OptimizerSettings, Role, TrainEngine
from areal_core.interfaces.workflow import Environment, Reward, RewardScore, RolloutWorkflow, WorkflowContext

__all__ = [
    "Advantage",
    "Aggregation",
    "Algorithm",
    "BroadcastGroup",
    "BroadcastReceiver",
    "Correction",
    "Dataset",
    "EndMeans",
    "Environment",
    "Filter",
    "GenerationRequest",
    "InferenceCapabilities",
    "InferenceEngine",
    "Launcher",
    "LossResult",
    "MemorySharer",
    "ModelReference",
    "ModelSource",
    "Needs",
    "OptimizerSettings",
    "PolicyLoss",
    "PolicyTerms",
    "ProcessEnd",
    "ProcessSpecification",
    "Processes",
    "Questioned",
    "Reward",
    "RewardScore",
    "Role",
    "RolloutWorkflow",
    "RunningProcess",
    "SamplingParameters",
    "TensorDescription",
    "Tracker",
    "TrainEngine",
    "UpdateMode",
    "WeightUpdate",
    "WorkflowContext",
]
