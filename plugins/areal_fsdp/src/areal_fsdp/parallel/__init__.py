"""How ranks divide a Hugging Face model, for training engines: its layers, its sequences, its batch."""
