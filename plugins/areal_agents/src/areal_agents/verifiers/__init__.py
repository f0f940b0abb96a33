"""Environments of verifiers (version 1 of its protocol), which run in an interpreter of their own."""
