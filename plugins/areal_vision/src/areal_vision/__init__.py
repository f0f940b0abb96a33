"""Vision-language models: read images, put them into prompts, and place them among the tokens of a model."""
