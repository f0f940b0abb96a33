"""The processes of a run: how they are started, connected, watched, restarted and ended.

`supervisor` starts groups of processes through a launcher (`local` on this machine; SLURM, Ray and others are plugins)
where `placement` puts them. Every process joins the driver's `hub` as a `member` and holds one connection to it, which
carries its heartbeats, its phase and the request to stop. The parent of a member is its `guard`: if the member, the
guard or the hub dies, the others kill the member's whole process tree. The guard closes the connection only when
nothing of the tree is left.
"""
