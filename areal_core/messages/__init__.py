"""What the processes of a run say to each other: one struct a message, in frames, without pickle.

`frames` turns a message into a frame and back, `peer` is either end of a connection. The messages themselves: `hub`
(the driver and the processes of a run), `rollouts` (trainer and rollout controller), `workflows` (rollout controller
and its workers), `scores` (reward pool and its workers), `servers` (the driver and the server pool).
"""

from areal_core.messages.credentials import Credentials
from areal_core.messages.frames import Done, Failed, FrameDecoder, Message, PeerClosed, PeerCorrupt, encode_frame
from areal_core.messages.peer import (
    LoopThread,
    Peer,
    Server,
    adopt,
    connect,
    connect_blocking,
    connect_once,
    private_folder,
    serve,
    socket_parent,
)

__all__ = [
    "Credentials",
    "Done",
    "Failed",
    "FrameDecoder",
    "LoopThread",
    "Message",
    "Peer",
    "PeerClosed",
    "PeerCorrupt",
    "Server",
    "adopt",
    "connect",
    "connect_blocking",
    "connect_once",
    "encode_frame",
    "private_folder",
    "serve",
    "socket_parent",
]
