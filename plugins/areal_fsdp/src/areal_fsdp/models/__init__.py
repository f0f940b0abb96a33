"""Hugging Face models as training engines use them: packed tokens in, values of each token out."""
