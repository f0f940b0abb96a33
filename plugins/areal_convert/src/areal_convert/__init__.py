"""Configs of other frameworks as configs of areal."""
