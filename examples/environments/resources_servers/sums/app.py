"""A resources server of NeMo Gym: sums of two numbers. NeMo Gym and areal both serve it; areal does not import it."""

from __future__ import annotations

from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer

__all__ = ["SumsServer"]


class SumRequest(BaseVerifyRequest):
    """The policy's response to a sum, and the result."""

    answer: str


class SumResponse(BaseVerifyResponse):
    """The reward, and whether the response begins with the working."""

    shows_working: bool


class SumsServer(SimpleResourcesServer):
    """Rewards the result behind the working, which is in braces."""

    async def verify(self, body: SumRequest) -> SumResponse:
        """Return reward 1 if the text behind the working is the result."""
        messages = [item for item in body.response.output if item.type == "message"]
        text = "".join(part.text for message in messages for part in message.content)
        is_right = text.rpartition("}")[2].strip() == body.answer
        return SumResponse(**body.model_dump(), reward=float(is_right), shows_working=text.startswith("{"))


if __name__ == "__main__":
    SumsServer.run_webserver()
