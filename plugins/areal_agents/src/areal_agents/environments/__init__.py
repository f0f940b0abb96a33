"""Conversations with tools, and environments of other libraries."""
