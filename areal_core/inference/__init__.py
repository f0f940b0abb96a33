"""Generation on servers: a fleet of servers as one inference engine. Each kind of server has an adapter, in a plugin.

- `adapter` and `http_client`: what an adapter does, and HTTP for it.
- `fleet`: the engine. `lifecycle` moves its servers (`server`, `pool`) through their states and gives them weights;
  `broadcast` forms process groups for weights, `reading` lets servers read them in GPU memory, `checks` and `probe`
  check servers, `routing` leases their slots.
- `client` and `answer`: generate in rollout workers.
- `programs` and `local`: start programs of servers; outside a run, the fleet does it itself.
- `settings`, `gpu_share`, `installations`: the config, the memory of a shared GPU, and where servers are installed.
"""
