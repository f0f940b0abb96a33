"""x"""
from areal_core.testing.conformance.inference import InferenceEngineSuite
