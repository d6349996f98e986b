"""The example of docs/python.md does what it says, and its table of errors is complete."""

from __future__ import annotations

import re
import subprocess
import sys

from server import REPOSITORY, Server

import kvstrata.errors

PAGE = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(shared_server: Server) -> None:
    """Only its endpoint differs."""
    code = PAGE.split("```python\n")[1].split("```")[0]
    printed = PAGE.split("```text\n")[1].split("```")[0]
    assert code.count('"127.0.0.1:9400"') == 1
    code = code.replace('"127.0.0.1:9400"', repr(shared_server.grpc))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_every_error_is_in_the_table() -> None:
    """With what else it is."""
    table = PAGE.split("| class |")[1]
    for name in kvstrata.errors.__all__:
        kind = getattr(kvstrata, name)
        builtin = [base for base in kind.__bases__ if base.__module__ == "builtins"]
        if name != "Error":
            row = re.search(rf"^\| [^|]*`{name}`[^|]* \|([^|]*)\|", table, re.MULTILINE)
            assert row is not None, f"{name} is not in the table"
            assert row[1].strip() == "".join(f"`{base.__name__}`" for base in builtin), name
