"""Places where code that nobody has read may run, and a reward by unit tests, for areal."""
