"""Does what a Dockerfile says in a clean Debian root, without a container engine, and uses it.

    sudo debootstrap --variant=minbase bookworm /srv/bookworm
    sudo python tests/docker/prove.py docker/Dockerfile.cpu --root /srv/bookworm --work /srv/proof

Every RUN is executed and every COPY made, in the order and with the ENV, ARG, WORKDIR and USER that
the file gives; each FROM is a fresh copy of --root (whatever image it names), or an earlier stage.
Then ENTRYPOINT and CMD are started as the file's USER over a read-only root, with the VOLUMEs and
/tmp writable, until HEALTHCHECK's own command succeeds; a completion is asked for, SIGTERM is sent,
and the exit status must be 0.

What this does not show: that the images named by FROM exist and are like --root.

Needs root (chroot, mount) on Linux. An instruction that this script does not know is an error, not
a gap. Exits 1 at the first step that fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SILENT = {"EXPOSE", "LABEL"}


class ProofError(Exception):
    """A step failed, or the file says something that this script cannot do."""


@dataclass(slots=True)
class Stage:
    """One FROM: its root folder and what its instructions have set."""

    name: str
    root: Path
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "root"
    volumes: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(name, arguments) of a Dockerfile, continuation lines joined and comments dropped."""
    joined = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or (not joined and not line.strip()):
            continue
        joined += line.rstrip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        name, _, rest = joined.strip().partition(" ")
        yield name.upper(), rest.strip()
        joined = ""
    if joined:
        raise ProofError(f"the file ends inside an instruction: {joined[:60]}")


def expand(text: str, values: Mapping[str, str]) -> str:
    """$NAME and ${NAME} as a Dockerfile expands them outside RUN."""
    return re.sub(
        r"\$(?:\{(\w+)\}|(\w+))", lambda m: values.get(m.group(1) or m.group(2), ""), text
    )


def assignments(text: str) -> list[tuple[str, str]]:
    """NAME=VALUE pairs of ENV and ARG; an ARG without a value is empty."""
    pairs = []
    for word in shlex.split(text):
        name, _, value = word.partition("=")
        pairs.append((name, value))
    return pairs


def exec_form(text: str) -> list[str]:
    """["a", "b"] as a list. The shell form hides signals from the server, so it is refused."""
    try:
        words = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProofError(f"not in exec form: {text[:60]}") from error
    return [str(word) for word in words]


def rules() -> list[str]:
    """Those of the repository's .dockerignore."""
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def ignored(path: str, rules: Sequence[str]) -> bool:
    """Whether .dockerignore keeps `path` (relative, with /) out: the last rule that fits."""
    out = False
    for rule in rules:
        keep = rule.startswith("!")
        pattern = rule.lstrip("!").rstrip("/")
        parts = path.split("/")
        prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        tail = pattern.removeprefix("**/")
        if pattern.startswith("**/"):
            fits = any(fnmatch.fnmatchcase(part, tail) for part in parts)
        else:
            fits = any(
                fnmatch.fnmatchcase(prefix, pattern) and prefix.count("/") == pattern.count("/")
                for prefix in prefixes
            )
        if fits:
            out = not keep
    return out


def say(text: str) -> None:
    print(text, flush=True)


class Proof:
    """Runs the stages of one Dockerfile under `work`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.file: Path = args.dockerfile
        self.clean_root: Path = args.root
        self.work: Path = args.work
        self.binds: list[Path] = args.bind
        self.build_args = dict(pair.split("=", 1) for pair in args.build_arg)
        self.pass_env = {name: os.environ[name] for name in args.env if name in os.environ}
        self.rules = rules()
        self.stages: list[Stage] = []
        self.num_steps = 0

    # -- building ---------------------------------------------------------------------------

    def build(self) -> Stage:
        """Every instruction in order; the last stage."""
        before_from: dict[str, str] = {}
        for name, rest in instructions(self.file.read_text()):
            if name == "ARG" and not self.stages:
                for key, value in assignments(rest):
                    before_from[key] = self.build_args.get(key, value)
                continue
            if name == "FROM":
                self._from(expand(rest, before_from))
                continue
            if not self.stages:
                raise ProofError(f"{name} before FROM")
            self._do(self.stages[-1], name, rest)
        if not self.stages:
            raise ProofError("no FROM")
        return self.stages[-1]

    def _from(self, rest: str) -> None:
        image, _, alias = rest.partition(" AS ")
        base = next((stage for stage in self.stages if stage.name == image), None)
        root = self.work / f"stage-{len(self.stages)}"
        say(f"FROM {rest}: a copy of {'stage ' + image if base else 'the clean root'}")
        source = base.root if base else self.clean_root
        subprocess.run(["cp", "-a", "--reflink=auto", str(source), str(root)], check=True)
        shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
        stage = Stage(alias or str(len(self.stages)), root)
        if base is not None:
            stage.env = dict(base.env)
        self.stages.append(stage)

    def _do(self, stage: Stage, name: str, rest: str) -> None:
        values = {**stage.args, **stage.env}
        if name == "RUN":
            self.num_steps += 1
            say(f"RUN {rest[:150]}")
            self._run(stage, rest)
        elif name == "COPY":
            self.num_steps += 1
            say(f"COPY {rest}")
            self._copy(stage, expand(rest, values))
        elif name == "ENV":
            stage.env.update((k, expand(v, values)) for k, v in assignments(rest))
        elif name == "ARG":
            for key, value in assignments(rest):
                stage.args[key] = self.build_args.get(key, expand(value, values))
        elif name == "WORKDIR":
            stage.folder = os.path.join(stage.folder, expand(rest, values))
            (stage.root / stage.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            stage.user = rest
        elif name == "VOLUME":
            stage.volumes += exec_form(rest)
        elif name == "ENTRYPOINT":
            stage.entrypoint = exec_form(rest)
        elif name == "CMD":
            stage.command = exec_form(rest)
        elif name == "HEALTHCHECK":
            stage.healthcheck = exec_form(rest[rest.index("CMD") + 3 :].strip())
        elif name not in SILENT:
            raise ProofError(f"{name} is not known here")

    def _inside(self, stage: Stage, mounts: Sequence[str], command: Sequence[str]) -> list[str]:
        """A command line that runs `command` in the stage's root, in its own mount namespace."""
        root = shlex.quote(str(stage.root))
        lines = ["set -eu"]
        for path in self.binds:
            target = f"{root}{shlex.quote(str(path))}"
            if path.is_dir():
                lines.append(f"mkdir -p {target}")
            else:
                lines.append(f"mkdir -p {shlex.quote(str(stage.root) + str(path.parent))}")
                lines.append(f"touch {target}")
            lines.append(f"mount --bind {shlex.quote(str(path))} {target}")
        lines += [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        lines += mounts
        lines.append(f"exec {shlex.join(command)}")
        return ["unshare", "--mount", "sh", "-c", "\n".join(lines)]

    def _env(self, stage: Stage, with_args: bool) -> dict[str, str]:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        values = {"PATH": path, "HOME": "/root", **self.pass_env}
        if with_args:
            values |= stage.args
            values["DEBIAN_FRONTEND"] = "noninteractive"
        return values | stage.env

    def _run(self, stage: Stage, shell: str) -> None:
        if stage.user != "root":
            raise ProofError("RUN after USER is not done here")
        began = time.monotonic()
        inner = f"cd {shlex.quote(stage.folder)} && {shell}"
        command = ["chroot", str(stage.root), "/bin/sh", "-ec", inner]
        log = self.work / f"step-{self.num_steps}.log"
        with log.open("wb") as out:
            status = subprocess.run(
                self._inside(stage, [], command), env=self._env(stage, True), stdout=out,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
            ).returncode  # fmt: skip
        if status:
            tail = log.read_text(errors="replace")[-2000:]
            raise ProofError(f"RUN ended with {status}:\n{tail}")
        say(f"    done in {time.monotonic() - began:.0f} s")

    def _copy(self, stage: Stage, rest: str) -> None:
        words = shlex.split(rest)
        options = [word for word in words if word.startswith("--")]
        *sources, target = [word for word in words if not word.startswith("--")]
        base, from_stage, owner = REPOSITORY, False, ""
        for option in options:
            key, _, value = option.partition("=")
            if key == "--chown":
                owner = value
                continue
            if key != "--from":
                raise ProofError(f"COPY {option} is not known here")
            base = next(s.root for s in self.stages if s.name == value)
            from_stage = True
        to = stage.root / os.path.join(stage.folder, target).lstrip("/")
        for source in sources:
            path = base / source.lstrip("/")
            if not path.exists():
                raise ProofError(f"COPY: there is no {source}")
            if from_stage:
                to.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", str(path), str(to)], check=True)
            elif path.is_dir():
                self._copy_tree(path, to)
            else:
                into = to / path.name if target.endswith(("/", ".")) else to
                self._copy_file(path, into)
        if owner:
            subprocess.run(["chown", "-R", owner, str(to)], check=True)

    def _copy_tree(self, folder: Path, to: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self._copy_file(path, to / path.relative_to(folder), must=False)

    def _copy_file(self, path: Path, to: Path, must: bool = True) -> None:
        if ignored(path.relative_to(REPOSITORY).as_posix(), self.rules):
            if must:
                raise ProofError(f"COPY: .dockerignore keeps {path.name} out")
            return
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)

    # -- using ------------------------------------------------------------------------------

    def use(self, stage: Stage, more: Sequence[str], wait_s: float) -> None:
        """Start the image's command, wait for its health check, ask it something, stop it."""
        if stage.user == "root":
            raise ProofError("the image's server would run as root")
        root = shlex.quote(str(stage.root))
        mounts = []
        for volume in stage.volumes:
            store = self.work / "volumes" / volume.strip("/").replace("/", "-")
            store.mkdir(parents=True, exist_ok=True)
            here = stage.root / volume.lstrip("/")
            subprocess.run(["chown", "--reference", str(here), str(store)], check=True)
            mounts.append(f"mount --bind {shlex.quote(str(store))} {shlex.quote(str(here))}")
        # The root itself read-only; what is mounted on it keeps its own mode.
        mounts.insert(0, f"mount --bind {root} {root} && mount -o remount,bind,ro {root}")
        # The bind hides mounts made before it: those come again, over it.
        mounts += [
            f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o size=256m tmpfs {root}/tmp",
        ]  # fmt: skip
        for path in self.binds:
            mounts.append(f"mount --bind {shlex.quote(str(path))} {root}{shlex.quote(str(path))}")
        enter = ["chroot", "--userspec", stage.user, str(stage.root)]
        command = [*stage.entrypoint, *(more or stage.command)]
        inner = f"cd {shlex.quote(stage.folder)} && exec {shlex.join(command)}"
        env = {**self._env(stage, False), "HOME": stage.folder}
        say(f"starting as {stage.user}, root read-only: {shlex.join(more or stage.command)}")
        log = self.work / "server.log"
        with log.open("wb") as out:
            server = subprocess.Popen(
                self._inside(stage, mounts, [*enter, "/bin/sh", "-c", inner]), env=env,
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            self._wait_healthy(stage, server, env, wait_s)
            self._complete()
            server.send_signal(signal.SIGTERM)
            status = server.wait(90)
        except BaseException:
            server.kill()
            say(log.read_text(errors="replace")[-3000:])
            raise
        if status:
            raise ProofError(f"the server ended with {status} on SIGTERM; see {log.name}")
        say("SIGTERM: the server ended with 0")

    def _wait_healthy(
        self, stage: Stage, server: subprocess.Popen[bytes], env: Mapping[str, str], wait_s: float
    ) -> None:
        began = time.monotonic()
        command = ["chroot", str(stage.root), *stage.healthcheck]
        while subprocess.run(command, env=dict(env), capture_output=True, check=False).returncode:
            if server.poll() is not None:
                raise ProofError(f"the server ended with {server.returncode}")
            if time.monotonic() - began > wait_s:
                raise ProofError(f"HEALTHCHECK did not succeed within {wait_s:.0f} s")
            time.sleep(1.0)
        say(f"HEALTHCHECK succeeded after {time.monotonic() - began:.0f} s")

    def _complete(self) -> None:
        body = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
        with urllib.request.urlopen("http://127.0.0.1:8000/v1/models", timeout=30) as answer:
            body["model"] = json.load(answer)["data"][0]["id"]
        request = urllib.request.Request(
            "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as answer:
            choice = json.load(answer)["choices"][0]
        say(f"{body['model']}: {body['prompt']}{choice['text']!r}")
        if not choice["text"]:
            raise ProofError("the completion is empty")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--root", type=Path, required=True, help="a clean Debian root; not changed")
    parser.add_argument("--work", type=Path, required=True, help="new folder for stages and logs")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--bind", type=Path, action="append", default=[], metavar="PATH",
        help="a path of this machine to show inside, e.g. a package mirror",
    )  # fmt: skip
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME",
        help="a variable of this shell to pass on, e.g. PIP_INDEX_URL",
    )  # fmt: skip
    parser.add_argument("--wait", type=float, default=900.0, help="seconds until healthy")
    parser.add_argument("--command", help="instead of CMD, e.g. for a device that is not here")
    parser.add_argument("--build-only", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if os.geteuid() != 0:
        print("this needs root: it mounts and changes roots", file=sys.stderr)
        return 2
    if args.work.exists() and any(args.work.iterdir()):
        print(f"{args.work} is not empty", file=sys.stderr)
        return 2
    args.work.mkdir(parents=True, exist_ok=True)
    proof = Proof(args)
    try:
        stage = proof.build()
        if not args.build_only:
            proof.use(stage, shlex.split(args.command or ""), args.wait)
    except (ProofError, subprocess.CalledProcessError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    say(f"{args.dockerfile.name}: {proof.num_steps} RUN and COPY steps done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
