"""Seccomp filter that refuses system calls which tests never need and which kernel exploits have used.

All other calls are allowed. Refused are: sockets of other families than unix, IPv4 and IPv6 (such as vsock, which
reaches a virtual machine's host outside any network namespace), tracing and reading other processes, keys, BPF,
performance counters, io_uring, userfaultfd, mounting, other namespaces, kernel modules, and opening files by handle.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from typing import Final

MACHINES: Final = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Audit id of each architecture, and its column in `REFUSED`."""
X32: Final = 0x40000000
"""First number of the x32 ABI, which repeats all calls of x86_64."""

_TABLE: Final = """
ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271; kcmp 312 272; pidfd_getfd 438 438;
add_key 248 217; request_key 249 218; keyctl 250 219; bpf 321 280; perf_event_open 298 241;
userfaultfd 323 282; io_uring_setup 425 425; io_uring_enter 426 426; io_uring_register 427 427; mount 165 40;
umount2 166 39; pivot_root 155 41; chroot 161 51; open_tree 428 428; move_mount 429 429; fsopen 430 430;
fsconfig 431 431; fsmount 432 432; fspick 433 433; mount_setattr 442 442; unshare 272 97; setns 308 268;
open_by_handle_at 304 265; init_module 175 105; finit_module 313 273; kexec_load 246 104; syslog 103 116;
quotactl 179 60; swapon 167 224; acct 163 89
"""
REFUSED: Final = [entry.split() for entry in _TABLE.replace("\n", " ").split(";")]
"""Names of refused calls, and their numbers on each of `MACHINES`."""
SOCKET: Final = (41, 198)
FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`


def system_call_filter() -> bytes | None:
    """Return the BPF program of the filter, or None for an architecture that is not listed here."""
    if platform.machine() not in MACHINES:
        return None
    machine, column = MACHINES[platform.machine()]
    program = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, X32),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]
    for _, *numbers in REFUSED:
        program += [(_EQUAL, 0, 1, int(numbers[column])), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    program += [(_EQUAL, 1, 0, SOCKET[column]), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for family in FAMILIES:
        program += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    program.append((_RETURN, 0, 0, _REFUSE | errno.EAFNOSUPPORT))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
