"""Processes of a run where they run: members and their guards, and the launchers of this machine and of any other.

Whoever starts a process, the process joins the driver's hub by itself (`member`), below a guard that ends what it
leaves behind (`guard`). `local` starts processes here, `external` on machines that somebody else brings (`node`).
"""

from areal_core.launchers.places import member_environment

__all__ = ["member_environment"]
