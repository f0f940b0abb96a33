"""Print the sums as rows for the resources server of NeMo Gym in resources_servers/sums."""

import json

import sums

for number in range(4000):
    question, answer = sums.task(number)
    print(json.dumps({"responses_create_params": {"input": question}, "answer": answer}))
