"""Generation on SGLang servers for areal."""
