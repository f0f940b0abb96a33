"""The sums as a resources server of NeMo Gym. NeMo Gym and areal both serve it; areal does not import it."""

from __future__ import annotations

import sums
from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer

__all__ = ["SumsServer"]


class SumRequest(BaseVerifyRequest):
    """The policy's response to a sum, and the answer."""

    answer: str


class SumResponse(BaseVerifyResponse):
    """The reward, and whether the response begins with the working."""

    shows_working: bool


class SumsServer(SimpleResourcesServer):
    """Rewards the answer."""

    async def verify(self, body: SumRequest) -> SumResponse:
        """Return the score of the response."""
        messages = [item for item in body.response.output if item.type == "message"]
        text = "".join(part.text for message in messages for part in message.content)
        reward = sums.score(text, body.answer)
        return SumResponse(**body.model_dump(), reward=reward, shows_working=text.startswith("{"))


if __name__ == "__main__":
    SumsServer.run_webserver()
