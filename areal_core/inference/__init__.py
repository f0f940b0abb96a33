"""Generation on servers: a fleet of servers as one inference engine. Each kind of server has an adapter, in a plugin.

- `adapter` and `http_client`: what an adapter does, and HTTP for it.
- `fleet`: the engine. `lifecycle` moves its servers (`server`, `pool`) through their states and gives them weights;
  `broadcast` forms process groups for weights, `checks` and `probe` check servers, `routing` leases their slots.
- `client` and `answer`: generate in rollout workers.
- `settings`, `serve`, `installations`: the config, `areal serve`, and where servers are installed.
"""
