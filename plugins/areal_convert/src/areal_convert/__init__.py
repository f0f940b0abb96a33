"""Convert configs of other frameworks to configs of areal."""
