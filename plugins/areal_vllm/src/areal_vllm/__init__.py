"""Generation on vLLM servers for areal."""
