"""Fine-tuning on what a data set's rows say: supervised, on preferences, and of reward models."""
