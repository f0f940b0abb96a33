"""A true scrape: what Prometheus would read, parsed by the library's own parser."""

import math
import socket
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from areal_core.errors import RunError
from areal_trackers.config import PrometheusSettings
from areal_trackers.prometheus import ADDRESS_FILE, PrometheusTracker

pytestmark = pytest.mark.slow


def scrape(run_dir):
    """The value of each metric that is served, by name, and the labels of all."""
    address = (run_dir / ADDRESS_FILE).read_text().strip()
    with urllib.request.urlopen(address, timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    labels = {tuple(sorted(sample.labels.items())) for sample in samples}
    return {sample.name: sample.value for sample in samples}, labels


@pytest.fixture
def tracker(run_dir):
    made = PrometheusTracker(PrometheusSettings(port=0))
    for epoch in ("000001", "000002", "000003"):
        (run_dir / "attempts" / epoch).mkdir(parents=True)
    made.start(run_dir, {"seed": 1})
    yield made
    made.close()


def test_a_scrape_finds_gauges_and_counters_with_run_and_role(tracker, run_dir, capsys):
    tracker.log(7, {"evaluation/reward": 0.5})
    tracker.log(8, {"train/loss": 1.5, "batch/sequences": 8, "batch/tokens": 100.0, "time/step_s": 2.0})
    tracker.log(9, {"train/loss": math.nan, "batch/sequences": 4, "batch/tokens": 50.0, "time/step_s": 1.0})
    found, labels = scrape(run_dir)
    assert labels == {(("role", "trainer"), ("run", run_dir.name))}
    assert math.isnan(found.pop("areal_train_loss"))
    assert found == {
        "areal_step": 9,
        "areal_recoveries": 2,
        "areal_evaluation_reward": 0.5,
        "areal_batch_sequences": 4,
        "areal_batch_tokens": 50,
        "areal_time_step_s": 1,
        "areal_trained_steps_total": 2,
        "areal_trained_sequences_total": 12,
        "areal_trained_tokens_total": 150,
    }


def test_where_it_is_asked_is_told_and_nobody_listens_when_it_has_ended(run_dir, capsys):
    tracker = PrometheusTracker(PrometheusSettings(port=0))
    tracker.start(run_dir, {})
    address = (run_dir / ADDRESS_FILE).read_text().strip()
    assert f"metrics for Prometheus: {address}" in capsys.readouterr().err
    tracker.close()
    tracker.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=30)


def test_a_host_that_there_is_not_is_said_and_no_other_port(run_dir):
    tracker = PrometheusTracker(PrometheusSettings(host="no-such-host.invalid"))
    with pytest.raises(
        RunError, match=r"no address of this machine is called 'no-such-host\.invalid': set host"
    ) as found:
        tracker.start(run_dir, {})
    assert "another port" not in str(found.value)


def test_a_port_that_is_taken_is_said_with_what_would_do(run_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tracker = PrometheusTracker(PrometheusSettings(port=port))
        with pytest.raises(RunError, match=f"cannot be served at 127.0.0.1:{port}: .* choose another port, or port: 0"):
            tracker.start(run_dir, {})
        tracker.close()


def has_ipv6():
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address ::1")
def test_metrics_are_served_at_an_address_of_ipv6(run_dir):
    tracker = PrometheusTracker(PrometheusSettings(host="::1", port=0))
    tracker.start(run_dir, {})
    tracker.log(3, {})
    try:
        assert scrape(run_dir)[0]["areal_step"] == 3
    finally:
        tracker.close()
