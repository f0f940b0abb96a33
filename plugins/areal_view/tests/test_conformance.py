"""The event hooks of this plugin against the kit."""

from areal_testing.conformance import EventsSuite


class TestReport(EventsSuite):
    plugin = "view"

    def test_there_is_a_report(self, tmp_path):
        self._call_hooks(tmp_path / "run", "done", range(1, 4))
        assert "held-out" in (tmp_path / "run" / "report.html").read_text()
