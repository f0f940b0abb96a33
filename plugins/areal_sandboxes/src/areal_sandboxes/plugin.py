"""What this plugin supplies: sandboxes, a reward by unit tests, and a question about the machine."""

from __future__ import annotations

from areal_core.plugins import Component, HealthCheck, hookimpl


@hookimpl
def areal_sandboxes() -> list[Component]:
    """Where code may run."""
    return [
        Component(
            "bubblewrap",
            "each command in namespaces of its own: no network, nothing of the run, limits on all that it takes",
            target="areal_sandboxes.bubblewrap:Bubblewrap",
            config="areal_sandboxes.config:BubblewrapSettings",
        ),
        Component(
            "container",
            "each command in a new container of docker or podman, without network",
            target="areal_sandboxes.container:Container",
            config="areal_sandboxes.config:ContainerSettings",
        ),
        Component(
            "none",
            "a plain process, for trusted code only: it holds against nothing",
            target="areal_sandboxes.plain:PlainProcess",
            config="areal_sandboxes.config:NoneSettings",
        ),
    ]


@hookimpl
def areal_reward_functions() -> list[Component]:
    """What code is worth."""
    return [
        Component(
            "unit_tests",
            "1, or the share of the row's tests, where the code of a completion passes them in a sandbox",
            target="areal_sandboxes.unit_tests:UnitTests",
            config="areal_sandboxes.config:UnitTestsSettings",
        ),
    ]


@hookimpl
def areal_health_checks() -> list[HealthCheck]:
    """Whether code can be kept apart here."""
    return [
        HealthCheck(
            "bubblewrap",
            "code that nobody has read can run apart from everything else",
            target="areal_sandboxes.health:check_bubblewrap",
        ),
    ]
