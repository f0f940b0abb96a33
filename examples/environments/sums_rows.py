"""Print rows for the resources server `sums`: sums of two numbers of two digits, always the same ones."""

import json
import random

generator = random.Random(0)
for _ in range(4000):
    first, second = generator.randrange(10, 100), generator.randrange(10, 100)
    print(json.dumps({"responses_create_params": {"input": f"{first}+{second}="}, "answer": str(first + second)}))
