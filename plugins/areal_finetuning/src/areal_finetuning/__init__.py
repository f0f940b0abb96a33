"""Fine-tuning on what a data set's rows say: supervised, on preferences, and of reward models."""

__version__ = "0.1.0"
