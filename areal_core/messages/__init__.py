"""What the processes of a run say to each other: typed messages in frames, without pickle. Standard library only."""
