"""The tests of the outside plugin run where it is installed: see tests/integration/test_outside_plugin.py."""

collect_ignore = ["areal-outside"]
