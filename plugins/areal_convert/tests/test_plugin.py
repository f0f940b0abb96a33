from areal_core.testing.conformance import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "convert"
