"""Conformance suites: requirements of a component as tests that its author inherits.

A test module of a plugin derives a class from a suite and makes the component:

    from areal_testing.conformance import InferenceEngineSuite

    class TestMyEngine(InferenceEngineSuite):
        def make_engine(self, folder, *, update_mode, slots):
            return MyEngine(MySettings(update_mode=update_mode, requests=slots), folder)

A component that a config names (rewards, workflows, algorithms and their parts) only needs `component =
"myplugin/name"`. Each test is an ordinary method that takes at most pytest's `tmp_path`, so a script can call it too.
"""

from areal_testing.conformance.advantages import AdvantageSuite, GroupFilterSuite, RewardShapingSuite
from areal_testing.conformance.algorithms import AlgorithmSuite
from areal_testing.conformance.batch_transforms import AuxiliaryLossSuite, BatchTransformSuite
from areal_testing.conformance.batches import make_batch
from areal_testing.conformance.components import ComponentSuite
from areal_testing.conformance.datasets import DatasetSuite
from areal_testing.conformance.environments import EnvironmentSuite
from areal_testing.conformance.example_tokenizers import ExampleTokenizerSuite
from areal_testing.conformance.inference import InferenceEngineSuite
from areal_testing.conformance.launchers import LauncherSuite
from areal_testing.conformance.loss_aggregations import LossAggregationSuite
from areal_testing.conformance.losses import CorrectionSuite, PolicyLossSuite, RegularizerSuite
from areal_testing.conformance.model_sources import ModelSourceSuite
from areal_testing.conformance.models import make_constant_model, make_model, reference_outputs
from areal_testing.conformance.observers import EventsSuite, TrackerSuite
from areal_testing.conformance.plugins import PluginSuite
from areal_testing.conformance.rewards import RewardSuite
from areal_testing.conformance.sandboxes import SandboxSuite
from areal_testing.conformance.training import TrainEngineSuite
from areal_testing.conformance.training_session import numbers_of
from areal_testing.conformance.workflows import WorkflowSuite

__all__ = [
    "AdvantageSuite",
    "AlgorithmSuite",
    "AuxiliaryLossSuite",
    "BatchTransformSuite",
    "ComponentSuite",
    "CorrectionSuite",
    "DatasetSuite",
    "EnvironmentSuite",
    "EventsSuite",
    "ExampleTokenizerSuite",
    "GroupFilterSuite",
    "InferenceEngineSuite",
    "LauncherSuite",
    "LossAggregationSuite",
    "ModelSourceSuite",
    "PluginSuite",
    "PolicyLossSuite",
    "RegularizerSuite",
    "RewardShapingSuite",
    "RewardSuite",
    "SandboxSuite",
    "TrackerSuite",
    "TrainEngineSuite",
    "WorkflowSuite",
    "make_batch",
    "make_constant_model",
    "make_model",
    "numbers_of",
    "reference_outputs",
]
