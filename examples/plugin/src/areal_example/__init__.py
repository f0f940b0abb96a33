"""A plugin for areal to copy."""
