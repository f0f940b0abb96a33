"""A plugin for areal."""
