"""The supervisor's side of a run whose nodes join, for the tests of those nodes."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from areal_core.launchers.joined import JoinedLauncher
from areal_core.launchers.settings import JoinedSettings
from areal_core.launchers.wardens import Wardens
from areal_core.messages import Credentials
from areal_core.runs.ownership import RECOVERING, claim, release
from areal_core.runs.standing import describe

if TYPE_CHECKING:
    from areal_core.runs.folder import RunFolder


class Supervising:
    """A supervisor that nodes join, and nothing else of a run; in a thread of its own."""

    def __init__(self, run: RunFolder, number: int = 1, *, lets_go: bool = False, goes_back: bool = False) -> None:
        self._lets_go, self._goes_back = lets_go, goes_back
        self.epoch = run.epoch(number)
        self.credentials = Credentials.create(number)
        self.said: list[str] = []
        self.nodes: list[str] = []
        self._run = run
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    async def _answer(self, channel) -> None:
        while True:
            _, number = await channel.receive_request()
            channel.reply(number, describe(self.wardens))

    async def _serve(self) -> None:
        launcher = JoinedLauncher(JoinedSettings(nodes=1, host="127.0.0.1", joining_timeout_s=60))
        nothing = dict.fromkeys(("on_message", "on_end"), lambda *_: None)
        wardens = self.wardens = Wardens(
            self.credentials,
            **nothing,
            on_notice=lambda node, _: wardens.let_go(node) if self._lets_go else None,
            on_visitor=self._answer,
        )
        await wardens.listen(launcher.host)
        claim(self.epoch, wardens.address, self.credentials)
        await wardens.bring(launcher, self.said.append, self._run.path)
        self.nodes += wardens.nodes
        while not self._is_over.is_set():
            await asyncio.sleep(0.01)
        if self._goes_back:
            latest = self._run.epoch(self.epoch.number + 1)
            await wardens.begin_epoch(replace(self.credentials, epoch=latest.number), lambda _: False)
            claim(latest, wardens.address, wardens.credentials)
            release(self.epoch, RECOVERING)
            self.epoch = latest
        await wardens.close()
