"""Adapters are imported by the engine that names them, and need nothing that only engines have."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENGINES = ("lmcache", "sglang", "torch", "vllm")
BLOCKED = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ENGINES!r}:
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Blocked())
"""


def run(code: str) -> str:
    """What a program prints in an interpreter of its own, where there are no engines."""
    command = [sys.executable, "-c", BLOCKED + code]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return ran.stdout.strip()


def test_the_package_imports_no_adapter() -> None:
    code = "import kvstrata; print([each for each in sys.modules if each.startswith('kvstrata.')])"
    modules = run(code)
    assert "kvstrata._native" in modules
    for name in ("engines", *ENGINES):
        assert f"kvstrata.{name}" not in modules


@pytest.mark.parametrize(
    ("module", "name"), [("sglang", "KvstrataStorage"), ("lmcache", "KvstrataConnector")]
)
def test_an_adapter_needs_no_engine(module: str, name: str) -> None:
    made = "kvstrata." + module
    assert run(f"from {made} import {name}; print({name}.__name__)") == name
