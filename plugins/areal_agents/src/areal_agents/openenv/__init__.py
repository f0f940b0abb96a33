"""Environments of OpenEnv (version 0.10), behind the WebSocket of its servers."""
