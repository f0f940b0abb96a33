"""Hugging Face models as training engines use them: packed tokens in, values of each token out."""

__version__ = "0.1.0"
