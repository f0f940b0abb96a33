"""Policy gradients as compositions: what a plugin that publishes an algorithm, or a part of one, builds on.

`settings` holds the config models (no torch), `composition` the algorithm, `passes` what models compute before it.
"""
