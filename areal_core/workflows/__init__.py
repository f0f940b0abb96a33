"""The workflows that come with the core: one turn, and several turns with an environment."""
