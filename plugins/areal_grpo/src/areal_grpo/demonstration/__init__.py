"""What a laptop can watch a language model learn: to show its working before it answers."""
