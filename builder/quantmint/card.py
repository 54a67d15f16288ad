"""The model card, rendered from the plan and the evidence and from nothing else.

Pure: the same values give the same bytes. A number that is in no evidence and no plan cannot get into a card.
"""

from __future__ import annotations

import json
import shlex
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from quantmint.evidence import Evidence, Scalar
from quantmint.launch import LaunchRecipe
from quantmint.manifest import Overlay
from quantmint.plan import Plan, gigabytes
from quantmint.recipe import Recipe


def render(
    recipe: Recipe,
    plan: Plan,
    evidence: tuple[Evidence, ...],
    *,
    overlay: Overlay | None,
    grade: str,
    reasons: tuple[str, ...],
) -> bytes:
    """The card as UTF-8 Markdown with the Hub's front matter.

    `grade` is the release's, `reasons` why it is not better; `overlay` the wheel in the package.
    """
    # Markdown, not HTML: `cell` and `line` keep foreign text inside its line and cell
    environment = Environment(autoescape=False, undefined=StrictUndefined, keep_trailing_newline=True)  # noqa: S701
    environment.filters.update(
        quoted=_quoted, cell=_cell, line=_line, count=_count, bytes=gigabytes, number=_number, command=_command
    )
    template = environment.from_string(files("quantmint").joinpath("templates/card.md.j2").read_text("utf-8"))
    text = template.render(
        recipe=recipe, plan=plan, evidence=evidence, overlay=overlay, grade=grade, grade_reasons=reasons
    )
    return ("\n".join(line.rstrip() for line in text.rstrip().split("\n")) + "\n").encode()


def _quoted(value: Any) -> str:
    """A YAML flow value: JSON is one."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _line(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _count(value: int) -> str:
    return f"{value:,}"


def _number(value: Scalar) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return f"{int(value):,}"
    return f"{value:.6g}" if isinstance(value, float) else value


def _command(launch: LaunchRecipe) -> str:
    settings = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    return (
        shlex.join(launch.argv(".", "127.0.0.1", 8000))
        if not settings
        else " ".join(settings) + " " + shlex.join(launch.argv(".", "127.0.0.1", 8000))
    )
