"""Programs that areal runs in other interpreters. None of them imports areal."""
