"""A run as a whole: its folder and its owner, its plan, its processes, and what the terminal shows of them.

The only room that composes the rollout half and the training half of a run.
"""
