"""The commands of a page of the documentation, and what it says that they print.

A block without a prompt is a script. In one with prompts, `$ ` begins a command, a `\\` at the end
goes on with it, and what follows is what it prints: every line in this order, where `...` stands
for lines that are left out. Numbers, with their units, and white space are not compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

FENCE = "```"
LEFT_OUT = "..."
NUMBER = re.compile(r"\d[\d,.]*( ?(B|KiB|MiB|GiB|TiB|kB|MB|GB|ms|s|min|h)\b)?")


@dataclass
class Command:
    """A script, and the lines that it prints if the page shows any."""

    script: str
    printed: list[str] | None = None


@dataclass
class Section:
    """What stands under one heading, up to the next."""

    heading: str
    files: list[str] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)


def sections(page: Path) -> dict[str, Section]:
    """The sections of a page by their headings."""
    found: dict[str, Section] = {}
    section, block, language = Section(""), [""], ""
    within = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith(FENCE):
            if within and language:
                section.files.append("\n".join(block) + "\n")
            elif within:
                section.commands += commands(block)
            within, language, block = not within, line.removeprefix(FENCE), []
        elif within:
            block.append(line)
        elif line.startswith("#"):
            section = Section(line.lstrip("# "))
            found[section.heading] = section
    assert not within, f"{page.name}: a block does not end"
    return found


def commands(block: list[str]) -> list[Command]:
    """Those of one block."""
    if not block[0].startswith("$ "):
        return [Command("\n".join(block))]
    found: list[Command] = []
    goes_on = False
    for line in block:
        if goes_on:
            found[-1].script += "\n" + line
        elif line.startswith("$ "):
            found.append(Command(line.removeprefix("$ "), []))
        else:
            printed = found[-1].printed
            assert printed is not None
            printed.append(line)
        goes_on = line.endswith("\\")
    return found


def plain(line: str) -> str:
    """A line without its numbers, and with one blank where it has some."""
    return " ".join(NUMBER.sub("#", line).split())


def differences(shown: list[str], said: str) -> str | None:
    """Where what was said is not what the page shows; None if it is."""
    lines = [plain(line) for line in said.splitlines()]
    at, anywhere = 0, False
    for line in shown:
        if line == LEFT_OUT:
            anywhere = True
            continue
        if anywhere and plain(line) in lines[at:]:
            at = lines.index(plain(line), at)
        if at >= len(lines) or lines[at] != plain(line):
            there = lines[at] if at < len(lines) else "the end"
            return f"the page shows\n  {line}\nwhere there is\n  {there}\nof\n{said}"
        at, anywhere = at + 1, False
    if at < len(lines) and not anywhere:
        return f"the page ends before\n  {lines[at]}\nof\n{said}"
    return None
