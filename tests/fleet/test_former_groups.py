"""Servers outlive a trainer: the next one has them leave the group in which they met the former."""

from __future__ import annotations

from areal_testing.virtual_time import run_virtually


def test_a_server_leaves_the_group_of_a_former_trainer_before_it_joins_the_next(running):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            former = await fleet.form_group("127.0.0.1", 1, "gloo", "")
        async with running(servers) as fleet:  # as after a recovery: it knows of no group
            await running.until(lambda: len(fleet.pool.ready) == 2, "both are ready")
            group = await fleet.form_group("127.0.0.1", 1, "gloo", "")
            await fleet.lifecycle._groups.joined()
            assert former.name != group.name
            assert fleet.adapter.left == [former.name] * 2
        async with running(servers) as fleet:
            await fleet.form_group("127.0.0.1", 1, "gloo", "")
            await fleet.lifecycle._groups.joined()
            assert set(fleet.adapter.left) == {group.name}, "each follows the last one"

    run_virtually(check())
