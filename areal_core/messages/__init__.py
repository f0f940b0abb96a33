"""What the processes of a run say to each other: one dataclass a message, in frames, without pickle.

`codec` turns a message into a frame and back, `channels` carries frames over unix sockets and TCP, for programs with
an event loop and without one. The messages themselves: `processes` (supervisor, wardens and the processes that they
keep), `rollouts` (trainer and rollout controller), `scores` (reward pool and its workers). Standard library only,
because a warden has nothing else.
"""

from areal_core.messages.blocking import BlockingChannel
from areal_core.messages.channels import Channel, Server, connect, private_folder, serve
from areal_core.messages.codec import ChannelClosed, ChannelCorrupt, FrameDecoder, encode_frame, message
from areal_core.messages.credentials import Credentials

__all__ = [
    "BlockingChannel",
    "Channel",
    "ChannelClosed",
    "ChannelCorrupt",
    "Credentials",
    "FrameDecoder",
    "Server",
    "connect",
    "encode_frame",
    "message",
    "private_folder",
    "serve",
]
