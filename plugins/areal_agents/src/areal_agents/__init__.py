"""Agents that talk to the policy over HTTP, and conversations with tools."""
