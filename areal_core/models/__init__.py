"""What trainers, servers and checks must know of a model, from its config and its files: each module has one subject.

No module imports torch or transformers before a function needs them, except `shown_masks`.
"""
