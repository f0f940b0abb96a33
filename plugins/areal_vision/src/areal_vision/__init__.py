"""Images: read for a model, put into its prompts, and placed among its tokens in generation and training."""
