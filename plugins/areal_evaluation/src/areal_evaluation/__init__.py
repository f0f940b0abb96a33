"""The command `areal eval`: evaluate a model without training it."""
