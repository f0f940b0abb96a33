"""Fine-tuning for areal: supervised, on preferences, reward models and distillation."""
