"""What the Dockerfile must hold. No image is built here: these are facts of the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

Rule = Callable[[str], list[str]]


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions in order, continuation lines joined, comments dropped."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(word.upper(), rest) for word, rest in pairs]


def last_stage(text: str) -> list[tuple[str, str]]:
    """The instructions of the image that is shipped."""
    all_of_them = instructions(text)
    start = max(i for i, (word, _) in enumerate(all_of_them) if word == "FROM")
    return all_of_them[start:]


def images_are_versioned(text: str) -> list[str]:
    """Every base image has a version, and it is not "latest"."""
    images = [rest.split()[0] for word, rest in instructions(text) if word == "FROM"]
    return [f"FROM {i}" for i in images if ":" not in i or i.endswith(":latest")]


def user_is_not_root(text: str) -> list[str]:
    """The shipped image runs as the UID that the chart uses."""
    users = [rest for word, rest in last_stage(text) if word == "USER"]
    return [] if users and users[-1].split(":")[0] in ("nonroot", "65532") else [f"USER {users}"]


def entrypoint_is_exec_form(text: str) -> list[str]:
    """The server is process 1 and gets SIGTERM: exec form, no shell."""
    found = [rest for word, rest in last_stage(text) if word in ("ENTRYPOINT", "CMD")]
    problems = [] if found else ["no ENTRYPOINT"]
    for rest in found:
        try:
            json.loads(rest)
        except ValueError:
            problems.append(f"shell form: {rest}")
    return problems


def ships_one_binary(text: str) -> list[str]:
    """The shipped image gets one file, from the builder, and runs nothing while it is made."""
    stage = last_stage(text)
    copies = [rest for word, rest in stage if word in ("COPY", "ADD")]
    problems = [f"RUN {rest}" for word, rest in stage if word == "RUN"]
    if len(copies) != 1 or "--from=" not in copies[0]:
        problems.append(f"copies: {copies}")
    return problems


def build_is_locked(text: str) -> list[str]:
    """The builder takes the versions of Cargo.lock, in release."""
    builds = [rest for word, rest in instructions(text) if word == "RUN" and "cargo build" in rest]
    locked = builds and all("--locked" in b and "--release" in b for b in builds)
    return [] if locked else [f"builds: {builds}"]


def bindings_can_be_made(text: str) -> list[str]:
    """The builder has libclang before it builds, and the shipped image is one with libstdc++."""
    runs = [rest for word, rest in instructions(text) if word == "RUN"]
    build = next((i for i, rest in enumerate(runs) if "cargo build" in rest), 0)
    problems = [] if any("libclang-dev" in rest for rest in runs[:build]) else ["no libclang-dev"]
    base = last_stage(text)[0][1]
    return problems if "distroless/cc" in base else [*problems, f"FROM {base} has no libstdc++"]


RULES: list[Rule] = [
    images_are_versioned,
    user_is_not_root,
    entrypoint_is_exec_form,
    ships_one_binary,
    build_is_locked,
    bindings_can_be_made,
]

# (rule, what the good file says, what a bad one would say)
DAMAGES: list[tuple[Rule, str, str]] = [
    (images_are_versioned, "rust:1.95-bookworm", "rust:latest"),
    (images_are_versioned, "rust:1.95-bookworm", "rust"),
    (user_is_not_root, "USER 65532:65532", "USER root"),
    (user_is_not_root, "USER 65532:65532", "# USER 65532"),
    (entrypoint_is_exec_form, 'ENTRYPOINT ["/usr/bin/kvstrata"]', "ENTRYPOINT kvstrata"),
    (ships_one_binary, "USER 65532:65532", "COPY . /\nUSER 65532"),
    (ships_one_binary, "USER 65532:65532", "RUN true\nUSER 65532"),
    (build_is_locked, "--locked", ""),
    (bindings_can_be_made, "libclang-dev", "clang-format"),
    (bindings_can_be_made, "distroless/cc-debian12", "distroless/static-debian12"),
]
