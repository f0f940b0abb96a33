"""Containers: their words, their refusal, and the suite where docker or podman can run one."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from areal_core.errors import ConfigError
from areal_sandboxes.config import ContainerSettings
from areal_sandboxes.container import Container
from areal_testing.conformance import SandboxSuite

IMAGE = "localhost/areal-sandbox-test:1"
SETTINGS = {"image": IMAGE, "memory_mib": 256, "processes": 32, "options": ["--ulimit", "nproc=1024:1024"]}
"""Podman asks for as many processes of a user as root has elsewhere, which fails where this machine gives fewer."""
TOOLS = ("sh", "cp", "mkdir", "sleep", "true")


def _root_folder(folder: Path) -> None:
    """Python, a shell and a few tools of this machine with the libraries that they need, as an image has them."""
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    programs = [*(Path(shutil.which(name) or name).resolve() for name in TOOLS), python.resolve()]
    library = Path(sysconfig.get_path("stdlib"))
    wanted = {path for path in [*programs, *library.glob("lib-dynload/*.so")] if path.exists()}
    for path in list(wanted):
        message = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False).stdout
        wanted |= {Path(word) for word in message.split() if word.startswith("/")}
    for path in wanted:
        target = folder / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    left_out = shutil.ignore_patterns("test", "site-packages", "dist-packages", "__pycache__", "idlelib", "config-*")
    shutil.copytree(library, folder / library.relative_to("/"), ignore=left_out, dirs_exist_ok=True)
    for name in ("bin", "tmp", "given", "proc", "dev", "sys", "etc"):
        (folder / name).mkdir(exist_ok=True)
    for name, program in [*zip(TOOLS, programs, strict=False), ("python3", python.resolve())]:
        if not (folder / "bin" / name).exists():
            (folder / "bin" / name).symlink_to(program)
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    (folder / "tmp").chmod(0o1777)


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """Words of docker or podman, with an image; skips where neither can run a container."""
    folder, said = tmp_path_factory.mktemp("image"), "neither docker nor podman is installed here"
    for words in (["podman"], ["podman", "--runtime", "runc"], ["docker"]):
        if shutil.which(words[0]) is None:
            continue
        if not (folder / "tmp").exists():
            _root_folder(folder)
        packed = subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE)
        made = subprocess.run([*words, "import", "-", IMAGE], stdin=packed.stdout, capture_output=True, check=False)
        packed.communicate()
        try:
            Container(ContainerSettings(program=words, **SETTINGS))
        except ConfigError as error:
            said = f"{' '.join(words)} can run no container here: {error.message} {made.stderr.decode()[-200:]}"
            continue
        yield words
        subprocess.run([*words, "rmi", "--force", IMAGE], capture_output=True, check=False)
        return
    pytest.skip(said)


@pytest.mark.slow
class TestContainer(SandboxSuite):
    memory_mib = 300
    processes = 33
    start_s = 15.0

    @pytest.fixture(autouse=True)
    def _made(self, program):
        type(self).program = program

    def make(self):
        return Container(ContainerSettings(program=self.program, **SETTINGS))


@pytest.mark.slow
def test_a_container_is_removed_at_the_limit(program):
    sandbox = Container(ContainerSettings(program=program, **SETTINGS))
    assert asyncio.run(sandbox.run(["sleep", "600"], timeout_s=3)).limit == "time"
    names = subprocess.run(
        [*program, "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True, check=True
    )
    assert "areal-" not in names.stdout


@pytest.mark.slow
def test_an_image_that_is_not_there(program):
    with pytest.raises(ConfigError, match="the sandbox container does not work") as caught:
        Container(ContainerSettings(program=program, image="localhost/nothing:1", options=SETTINGS["options"]))
    assert "pull localhost/nothing:1" in str(caught.value)


def test_the_words_of_a_command():
    sandbox = object.__new__(Container)  # the words alone: neither program need be here
    sandbox._settings = ContainerSettings(image="some/image", memory_mib=512, cores=0.5, options=["--runtime=runsc"])
    sandbox._program = ("docker",)
    words = sandbox.words("areal-1", "/tmp/files")
    text = " ".join(words)
    assert words[:3] == ["docker", "run", "--rm"]
    for wanted in (
        "--network none", "--read-only", "--memory 512m --memory-swap 512m", "--pids-limit 64", "--cpus 0.5",
        "--cap-drop ALL", "--security-opt no-new-privileges", "--pull=never", "--name areal-1", "--user 65534:65534",
        "--volume /tmp/files:/given:ro", "size=64m", "--runtime=runsc --entrypoint /bin/sh some/image -c",
    ):  # fmt: skip
        assert wanted in text, text


def test_the_runtime_itself_is_given_no_secret(monkeypatch, tmp_path):
    """It may be set up to hand its own environment on."""
    runtime = tmp_path / "docker"
    runtime.write_text("#!/bin/sh\nenv")
    runtime.chmod(0o700)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("DOCKER_HOST", "unix:///somewhere")
    output = asyncio.run(Container(ContainerSettings(program=[str(runtime)])).run(["true"])).output
    assert "DOCKER_HOST=unix:///somewhere" in output
    assert "HF_TOKEN" not in output


def test_where_neither_is_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs docker or podman, and neither is installed") as caught:
        Container(ContainerSettings())
    assert "apt-get install podman" in str(caught.value)


def test_where_it_cannot_run(tmp_path, monkeypatch):
    """Nobody listens where docker's daemon should."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed here")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(ConfigError, match="the sandbox container does not work on this machine"):
        Container(ContainerSettings(program=["docker"]))
