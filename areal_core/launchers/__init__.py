"""Processes of a run: wardens and keepers, which start and end them, and the launcher of this machine.

A launcher brings one warden (`warden`) to each node. The warden starts each process under a keeper (`keeper`,
`keepers`), and speaks with the supervisor's end (`wardens`).
"""
