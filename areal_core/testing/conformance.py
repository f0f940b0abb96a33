"""The old names of the conformance suites, which are in `areal_testing.conformance`."""

from areal_core.exports import deprecated_names

_MOVED = (
    "AdvantageSuite",
    "AlgorithmSuite",
    "AuxiliaryLossSuite",
    "BatchTransformSuite",
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
)

__getattr__ = deprecated_names(__name__, {name: f"areal_testing.conformance.{name}" for name in _MOVED})
