"""A machine of its own for commands that stand in the documentation: as they stand, on the ports
that they name, beside whatever runs on the host.

Its processes have namespaces of their own: of the network, with nothing but loopback; of mounts,
with an empty /mnt and /tmp, names and file systems of its own; of processes, which all end with it.
It needs root, and says so where it has not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")

DEADLINE_SECONDS = 60.0
"""For one command, and for one condition: other things may be built on the host."""
POLL_SECONDS = 0.05
UNSHARE = ("unshare", "--net", "--mount", "--propagation", "private", "--pid", "--fork")
# The first process of a machine: it takes in whoever is left behind, and ends when the test does.
FIRST = "echo >ready; cat >/dev/null; :"
SET_UP = """
ip link set lo up
mount -t tmpfs tmpfs /mnt
mkdir /mnt/home
for file in hosts fstab; do
  mount --bind "$1/$file" "/etc/$file"
done
# What programs leave in /tmp goes with the machine; its directory may be there, too.
mount --bind "$1" /mnt/home
mount -t tmpfs tmpfs /tmp
mkdir -p "$1"
mountpoint -q "$1" || mount --bind /mnt/home "$1"
"""


def missing() -> str | None:
    """What keeps this host from having machines; None if nothing does."""
    if os.geteuid() != 0:
        return "it needs root"
    for tool in ("unshare", "nsenter", "mount", "ip", "iptables", "curl", "openssl"):
        if shutil.which(tool) is None:
            return f"it needs {tool}"
    tried = subprocess.run(
        [*UNSHARE, "--mount-proc", "mount", "-t", "tmpfs", "x", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Machine:
    """Runs shell scripts in a directory of its own, with these programs."""

    def __init__(
        self, home: Path, programs: Mapping[str, Path], *, hosts: list[str], disks: list[str]
    ) -> None:
        """`hosts` are names of loopback; `disks` are mounted by /etc/fstab, empty each time."""
        self.home = home
        (home / "bin").mkdir()
        for name, path in programs.items():
            (home / "bin" / name).symlink_to(path)
        (home / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in hosts))
        tables = [f"tmpfs {disk} tmpfs size=512m 0 0\n" for disk in disks]
        (home / "fstab").write_text("".join(tables))
        inherited = os.environ.get("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
        self.environment = {
            "HOME": str(home),
            "PATH": f"{home / 'bin'}:{inherited}:/usr/sbin:/sbin",
            "LC_ALL": "C.UTF-8",
        }
        command = [*UNSHARE, "--kill-child", "--mount-proc", "bash", "-c", FIRST]
        self._first = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=home)
        self.until((home / "ready").exists, "its first process")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        inside = children.read_text().strip()
        self._enter = ["nsenter", "--target", inside, "--net", "--mount", "--pid", f"--wd={home}"]
        self.run(SET_UP, str(home))
        for disk in disks:
            self.run('mkdir -p "$1"; mount "$1"', disk)

    def close(self) -> None:
        """Ends all that runs on it."""
        self._first.kill()
        self._first.wait()
        if self._first.stdin is not None:
            self._first.stdin.close()

    def _run(self, script: str, *arguments: str) -> tuple[int, str]:
        # Into a file: what a script leaves running would hold a pipe open.
        with tempfile.TemporaryFile() as said:
            done = subprocess.run(
                [*self._enter, "bash", "-euo", "pipefail", "-c", script, "bash", *arguments],
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=DEADLINE_SECONDS,
                check=False,
            )
            said.seek(0)
            return done.returncode, said.read().decode(errors="replace")

    def run(self, script: str, *arguments: str) -> str:
        """What a script says, which must succeed."""
        code, said = self._run(script, *arguments)
        assert code == 0, f"{script}\nended with {code}:\n{said}"
        return said

    def fails(self, script: str) -> str:
        """What a script says that must not succeed."""
        code, said = self._run(script)
        assert code != 0, f"{script}\nsucceeded:\n{said}"
        return said

    def succeeds(self, script: str) -> bool:
        """Whether a script does."""
        return self._run(script)[0] == 0

    def until(self, condition: Callable[[], Found | None], what: str) -> Found:
        """Waits for something that comes; returns it."""
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            found = condition()
            if found:
                return found
            assert time.monotonic() < end, f"never: {what}"
            time.sleep(POLL_SECONDS)

    def until_says(self, script: str, words: str) -> str:
        """Waits until a script succeeds and says something."""
        said = ""

        def asked() -> str | None:
            nonlocal said
            code, said = self._run(script)
            return said if code == 0 and words in said else None

        try:
            return self.until(asked, f"{words!r} of {script}")
        except AssertionError as never:
            raise AssertionError(f"{never}\nlast: {said}") from None

    def file(self, name: str) -> str:
        """A file of its directory."""
        return (self.home / name).read_text(encoding="utf-8", errors="replace")
