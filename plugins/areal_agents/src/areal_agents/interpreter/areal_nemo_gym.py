"""Serve a resources server of NeMo Gym, or list its example rows. areal runs this file in the interpreter that has it.

    PYTHON areal_nemo_gym.py rows FILE    copy the server's example rows to FILE, one JSON object per line
    PYTHON areal_nemo_gym.py serve        write the server's address to standard output, then serve

Both read one JSON object from standard input: `server`, the name of a folder in `resources_servers`, and for `serve`
also `settings`, a mapping with settings of that server. The server ends when its standard input is closed, so it never
outlives the process that started it.

This file imports nothing of areal, and it needs nemo-gym 0.4.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import _areal_serving  # type: ignore[import-not-found]


def folder_of(server: str) -> Path:
    """Return the folder of a resources server.

    Raises:
        SystemExit: there is none of that name.
    """
    spec = importlib.util.find_spec("resources_servers")
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    if not places:
        raise SystemExit("this interpreter has no NeMo Gym: the package resources_servers is missing")
    for place in places:
        if (place / server / "app.py").is_file():
            return place / server
    raise SystemExit(f"there is no resources server {server}: no {server}/app.py in {', '.join(map(str, places))}")


def copy_rows(server: str, path: Path) -> None:
    """Copy the example rows of a server.

    Raises:
        SystemExit: it has none.
    """
    rows = folder_of(server) / "data" / "example.jsonl"
    if not rows.is_file():
        raise SystemExit(f"the resources server {server} has no example rows ({rows}): set the data set's `path`")
    shutil.copyfile(rows, path)


def make_app(server: str, settings: dict[str, Any], port: int) -> Any:
    """Return the web application of a resources server, as NeMo Gym itself sets it up.

    Raises:
        SystemExit: its module does not define exactly one server.
    """
    from nemo_gym.base_resources_server import SimpleResourcesServer
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from omegaconf import DictConfig

    sys.path.append(str(folder_of(server)))  # some servers import modules beside app.py
    module = importlib.import_module(f"resources_servers.{server}.app")
    classes: list[Any] = [
        each
        for each in vars(module).values()
        if inspect.isclass(each)
        and issubclass(each, SimpleResourcesServer)
        and each.__module__ == module.__name__
        and not inspect.isabstract(each)
    ]
    if len(classes) != 1:
        names = ", ".join(each.__name__ for each in classes) or "none"
        raise SystemExit(f"{module.__name__} must define one resources server; it defines {names}")
    required = {"host": "127.0.0.1", "port": port, "entrypoint": "app.py", "name": server}
    config = classes[0].model_fields["config"].annotation.model_validate({**settings, **required})
    # There is no head server: a server that calls another one, such as a judge, fails with the other one's name.
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=port), global_config_dict=DictConfig({})
    )
    instance = classes[0](config=config, server_client=client)
    app = instance.setup_webserver()
    instance.setup_liveness(app)
    instance.setup_exception_middleware(app)
    return app


def main() -> None:
    """Run the command of the command line."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a server prints does not mix with the address
    sys.path.append(str(Path.cwd()))  # the user's own servers are in the folder resources_servers
    request = json.loads(sys.stdin.readline())
    if sys.argv[1] == "rows":
        copy_rows(request["server"], Path(sys.argv[2]))
        return
    listening = _areal_serving.listen()
    app = make_app(request["server"], request["settings"], listening.getsockname()[1])
    _areal_serving.serve(app, listening, output)


if __name__ == "__main__":
    main()
