"""Conversations: from a row of a data set to the tokens that a model reads, and back from its tokens to an answer.

Every entry of areal goes through this package: rollouts, supervised fine-tuning, preferences, distillation, images,
agents and evaluation. A row takes four steps:

1. `messages` checks the form of a conversation and its tools, and writes them in one form.
2. `rows` collects what a row and its settings give to the chat template.
3. `template` renders the conversation and encodes the text as a whole. Nothing else calls `apply_chat_template`.
4. `answers` decides where an answer ends, and what a reward is shown of it.

A row that cannot be used raises `RowError`, which names the field and the remedy. The names that this package exports
are public.
"""

from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(__name__, __file__)
