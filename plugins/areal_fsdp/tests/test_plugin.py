from areal_testing.conformance import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "fsdp"
