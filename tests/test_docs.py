"""The documentation runs: every python block of every page, and every error message is explained.

A page's python blocks run in order, in one namespace, in a process of their own, so that a page may
set up JAX as its reader would.  A text block that follows a python block is what that block prints,
with "..." for what differs from machine to machine.  To run one page by hand:

    python tests/test_docs.py docs/state.md
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(page: Path) -> None:
    """Runs a page's python blocks and compares what they print with the text blocks after them.

    Raises:
      AssertionError: if a text block says something else.
      Exception: whatever a python block raises.
    """
    source = page.read_text()
    namespace: dict = {"__name__": "__main__"}
    printed = None
    for match in _BLOCK.finditer(source):
        language, code = match.groups()
        line = source[: match.start()].count("\n") + 1
        if language == "python":
            stdout = io.StringIO()
            with contextlib.redirect_stdout(stdout):
                exec(compile("\n" * line + code, str(page), "exec"), namespace)
            printed = stdout.getvalue()
        elif language == "text" and printed is not None:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            same = doctest.OutputChecker().check_output(code, printed, flags)
            assert same, f"{page}:{line} says\n{code}\nbut the block before it prints\n{printed}"
            printed = None
        else:
            printed = None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path):
    import nnx_dp

    package_root = Path(nnx_dp.__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "PYTHONPATH": str(package_root),
    }
    result = subprocess.run(
        [sys.executable, __file__, str(page)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    text = _BLOCK.sub("", page.read_text())
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    missing = [
        target
        for target in targets
        if target and "://" not in target and not (page.parent / target).exists()
    ]
    assert not missing


# ---------------------------------------------------------------------------------------------
# Every error message is in docs/errors.md


def _messages() -> Iterator[tuple[str, str]]:
    """Yields (place, template) of each message that nnx_dp raises or warns with.

    A template is the message with "{}" for each value that is filled in.
    """
    for path in sorted((ROOT / "nnx_dp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = None
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                # An Unwatchable never leaves the package.
                caught = getattr(node.exc.func, "id", "") == "Unwatchable"
                call = None if caught else node.exc
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                name = getattr(node.value.func, "id", "")
                call = node.value if name.endswith("Error") else None
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_warn_once":
                call = node
            if call is not None and call.args:
                template = _template(call.args[0])
                if template.replace("{}", "").strip():
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", template


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return "{}"


def _explained(template: str, page: str) -> bool:
    """Whether the page quotes the message: the longest constant part of its first sentence."""
    sentence = re.split(r"\. |\n", template)[0]
    quoted = max(sentence.split("{}"), key=len)
    return " ".join(quoted.split()).rstrip(".") in page


def test_every_error_message_is_explained():
    page = " ".join((ROOT / "docs" / "errors.md").read_text().split())
    messages = list(_messages())
    assert len(messages) > 30
    missing = [f"{place}: {text}" for place, text in messages if not _explained(text, page)]
    assert not missing, "docs/errors.md does not quote:\n" + "\n".join(missing)


if __name__ == "__main__":
    # The page's own directory, not that of this file, comes first for its imports.
    sys.path[0] = ""
    run_page(Path(sys.argv[1]))
