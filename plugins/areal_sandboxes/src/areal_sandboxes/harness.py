"""Runs inside of a sandbox: holds code to a text of tests. Standard library only; sent as a text, never imported there.

This process splits off a child, which has no copy of what comes then: tests and token from the standard input, a pipe
that is empty afterwards, whoever else has it. Then only the child begins with the code; it says that it is ready, is
handed the tests, and tells of each what became of it. This process lets nobody look into it, and writes the verdict.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import secrets
import sys
from pathlib import Path

PR_SET_DUMPABLE = 4
BEGIN, READY = "begin\n", "ready\n"


def split(tests: str) -> list[tuple[str, bool]]:
    """Top-level statements of a text, and whether each is a test; where no one is an assert, the text is one test."""
    body = ast.parse(tests).body
    if not any(isinstance(statement, ast.Assert) for statement in body):
        return [(tests, True)]
    return [(ast.unparse(statement), isinstance(statement, ast.Assert)) for statement in body]


def run_code(path: str, ready: int, handed: int) -> None:
    """The child: the code, then the tests in the code's own names."""
    hand = os.fdopen(handed)
    if hand.readline() != BEGIN:
        return
    space = {"__name__": "solution", "__file__": path}
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), space)
    log = os.fdopen(ready, "w", buffering=1)
    log.write(READY)
    nonce, statements = json.loads(hand.read())
    for number, (text, is_test) in enumerate(statements):
        try:
            exec(compile(text, "<tests>", "exec"), space)
        except Exception as error:
            if not is_test:
                raise
            sys.stderr.write(f"{text[:200]}: {type(error).__name__}: {error}\n")
        else:
            if is_test:
                log.write(f"{nonce} {number}\n")


def judge(ready: int, handing: int) -> None:
    """The parent: hand out the tests, count what passed, and write that behind the token."""
    given = json.loads(sys.stdin.read())
    statements = [statement for text in given["tests"] for statement in split(text)]
    nonce = secrets.token_hex(16)
    hand = os.fdopen(handing, "w")
    hand.write(BEGIN)
    hand.flush()
    heard = os.fdopen(ready)
    passed = set()
    if heard.readline() == READY:
        try:
            with hand:
                json.dump([nonce, statements], hand)
        except BrokenPipeError:
            pass
        for line in heard:
            told, _, number = line.rstrip("\n").partition(" ")
            if told == nonce:
                passed.add(number)
    count = sum(is_test for _, is_test in statements)
    sys.stdout.write(f"{given['token']} {len(passed)} {count}\n")


def main() -> None:
    """Begin with the code before anything is read that it must not see."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    ready, told = os.pipe()
    handed, handing = os.pipe()
    if os.fork() == 0:
        os.close(ready)
        os.close(handing)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        run_code(sys.argv[1], told, handed)
        sys.exit(0)
    os.close(told)
    os.close(handed)
    judge(ready, handing)


if __name__ == "__main__":
    main()
