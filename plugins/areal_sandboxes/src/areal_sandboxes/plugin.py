"""Components of this plugin: sandboxes, a reward by unit tests, and a health check."""

from __future__ import annotations

from areal_core.plugins import Component, HealthCheck, hookimpl


@hookimpl
def areal_sandboxes() -> list[Component]:
    """Sandboxes for untrusted code."""
    return [
        Component(
            "bubblewrap",
            "runs each command in namespaces of its own: no network, no files of the run, limits on all resources",
            target="areal_sandboxes.bubblewrap:Bubblewrap",
            config="areal_sandboxes.config:BubblewrapSettings",
        ),
        Component(
            "container",
            "runs each command in a new docker or podman container without network",
            target="areal_sandboxes.container:Container",
            config="areal_sandboxes.config:ContainerSettings",
        ),
        Component(
            "none",
            "runs a plain process without any isolation, for trusted code only",
            target="areal_sandboxes.plain:PlainProcess",
            config="areal_sandboxes.config:NoneSettings",
        ),
    ]


@hookimpl
def areal_reward_functions() -> list[Component]:
    """Rewards that run the code of an answer."""
    return [
        Component(
            "unit_tests",
            "1 if the code of an answer passes the row's tests in a sandbox, or the share of tests that it passes",
            target="areal_sandboxes.unit_tests:UnitTests",
            config="areal_sandboxes.config:UnitTestsSettings",
        ),
    ]


@hookimpl
def areal_health_checks() -> list[HealthCheck]:
    """Health check of the sandbox bubblewrap."""
    return [
        HealthCheck(
            "bubblewrap",
            "runs each command in namespaces of its own: no network, no files of the run, limits on all resources",
            target="areal_sandboxes.health:check_bubblewrap",
        ),
    ]
