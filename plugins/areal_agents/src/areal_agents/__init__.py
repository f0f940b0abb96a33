"""Agents that talk to the policy over HTTP."""
