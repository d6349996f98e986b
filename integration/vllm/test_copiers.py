"""What copies blocks for the connector, on tensors of the torch that vLLM has."""

from __future__ import annotations

import subprocess

import pytest
from engine import ENVIRONMENT, HERE


@pytest.fixture(scope="module")
def adapter() -> None:
    """There is no engine here."""


def test_both_copiers_do_the_same() -> None:
    subprocess.run([ENVIRONMENT / "venv/bin/python", HERE / "copiers.py"], check=True, timeout=120)
