"""An agent as anybody has one: it asks a model behind an address, and knows what a right answer is worth.

Nothing in it is areal's: `solve("47+38=", "85", "https://api.openai.com/v1", key)` works as well.
"""

from __future__ import annotations

import openai

# One client for all episodes: each new one reads the certificates of the system anew, which takes 30 ms.
client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none yet")


async def solve(prompt: str, answer: str, base_url: str, api_key: str) -> dict[str, object]:
    """Ask for a sum, and check what stands behind the working."""
    policy = client.with_options(base_url=base_url, api_key=api_key)
    done = await policy.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
    said = (done.choices[0].message.content or "").rpartition("}")[2].strip()
    is_right = float(said == answer)
    return {"reward": is_right, "rewards": {"right": is_right}}
