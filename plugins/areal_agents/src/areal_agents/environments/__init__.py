"""Conversations of the policy with tools."""
