"""Print rows for NeMo Gym's server `reasoning_gym`: sums of reasoning-gym, asked in the words of the small model.

Run it with the interpreter that has NeMo Gym and reasoning-gym. The server scores an answer as reasoning-gym does.
"""

import json

import reasoning_gym

for entry in reasoning_gym.create_dataset("chain_sum", size=4000, seed=0, max_terms=2, min_digits=2, max_digits=2):
    expression = entry["metadata"]["expression"].replace(" ", "")
    if "-" not in expression:
        row = {**entry, "responses_create_params": {"input": f"{expression}="}}
        print(json.dumps(row))
