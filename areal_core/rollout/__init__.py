"""The asynchronous half of a run: admission, episodes, staleness and the ledger of prompts.

It runs in one process, the rollout controller, beside rank 0 of the trainer. It knows nothing about models: it sees
token ids, weight versions and folders.
"""
