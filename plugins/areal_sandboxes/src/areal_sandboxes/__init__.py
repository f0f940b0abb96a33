"""Sandboxes that run untrusted code, and a reward by unit tests."""
