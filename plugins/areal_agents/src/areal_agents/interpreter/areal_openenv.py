"""Serve an environment of OpenEnv, or list its tasks. areal runs this file in the interpreter that has OpenEnv.

    PYTHON areal_openenv.py tasks FILE    write each task of a split to FILE, one JSON object per line
    PYTHON areal_openenv.py serve         write the server's address to standard output, then serve

Both read one JSON object from standard input: `app`, a web application of OpenEnv as MODULE:NAME, and for `tasks` also
`split`, `first` and `size`. The server ends when its standard input is closed, so it never outlives the process that
started it.

This file imports nothing of areal, and it needs openenv 0.10.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import _areal_serving  # type: ignore[import-not-found]
import _areal_tasks  # type: ignore[import-not-found]


def load_app(name: str) -> Any:
    """Return a web application by MODULE:NAME. A function without arguments is called, as uvicorn's `--factory` does.

    Raises:
        SystemExit: the module has no such name.
    """
    from fastapi import FastAPI

    path, _, attribute = name.partition(":")
    module = importlib.import_module(path)
    try:
        app = getattr(module, attribute or "app")
    except AttributeError as error:
        raise SystemExit(f"{name} cannot be loaded: {error}") from None
    return app if isinstance(app, FastAPI) else app()


def main() -> None:
    """Run the command of the command line."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints does not mix with the address
    sys.path.append(str(Path.cwd()))
    request = json.loads(sys.stdin.readline())
    app = load_app(request["app"])
    if sys.argv[1] == "serve":
        _areal_serving.serve(app, _areal_serving.listen(), output)
        return
    from fastapi.testclient import TestClient

    def ask(path: str, body: dict[str, Any] | None) -> tuple[int, str]:
        answer = client.get(path) if body is None else client.post(path, json=body)
        return answer.status_code, answer.text

    try:
        with TestClient(app) as client:  # with the application's start and end
            rows = _areal_tasks.list_tasks(ask, request["split"], request["first"], request["size"])
    except ValueError as error:
        raise SystemExit(str(error)) from None
    with Path(sys.argv[2]).open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
