"""Train agents that call the policy over HTTP, and policies that use tools or play in environments."""
