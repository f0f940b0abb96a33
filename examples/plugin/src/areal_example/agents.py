"""An agent: a program that talks to an endpoint, as it would to any model's. It needs nothing of areal."""

from __future__ import annotations

from areal_core.plugins import register


@register("agents")
async def solver(prompt: str, answer: str, base_url: str, api_key: str) -> float:
    """Ask once through OpenAI's SDK, and compare the reply with the answer of the row."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
    return float(reply.choices[0].message.content == answer)
