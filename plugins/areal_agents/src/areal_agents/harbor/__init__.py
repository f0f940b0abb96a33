"""Tasks in the format of Harbor (version 0.26), played in a sandbox."""
