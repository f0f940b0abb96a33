"""Generation on servers: a fleet of them as one inference engine. Adapters for kinds of servers are plugins."""
