"""Executed notebooks as self-contained HTML pages: images and styles embedded, no scripts, no network access.

Formulas in the notebooks are plain Unicode, so they are readable everywhere without a renderer.
"""

import re
from html import escape
from pathlib import Path

from fedmem.machine.paths import data_file

PARAMETERS_NOTE = "parameters-note"  # tag of a cell of words about the cell of parameters that follows
STYLE = data_file("page.css").read_text("utf-8")


def to_html(notebook: Path, show_code: bool = True) -> str:
    """The executed notebook as one HTML page, without the scripts of its outputs.

    notebook: an .ipynb file. show_code: False leaves the code cells out.
    Raises what nbformat raises when the file is not a valid notebook.
    """
    import nbformat  # the style sheet above is also used where nbconvert is not needed
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor
    from pygments.formatters import HtmlFormatter
    from traitlets.config import Config

    # A notebook that was opened elsewhere may have widget metadata without state. No exporter renders it, and it would
    # show nothing without scripts.
    content = nbformat.read(notebook, as_version=4)
    content.metadata.pop("widgets", None)
    if not show_code:  # then notes on code speak of nothing
        content.cells = [cell for cell in content.cells if PARAMETERS_NOTE not in cell.metadata.get("tags", ())]
    exporter = HTMLExporter(
        template_name="basic",
        exclude_input=not show_code,
        config=Config({"HTMLExporter": {"preprocessors": [CoalesceStreamsPreprocessor]}}),
    )
    body, _ = exporter.from_notebook_node(content)
    # libraries such as plotly put scripts into their outputs; a shared page must run none
    body = re.sub(r"<script\b.*?</script>", "", body, flags=re.DOTALL | re.IGNORECASE)
    code_style = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    return page(_title(content), code_style, body)


def page(title: str, style: str, body: str) -> str:
    """A self-contained HTML page. title: escaped here; style: CSS after the common style sheet; body: HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _title(content) -> str:
    """The notebook's first heading; "fedmem" without one."""
    for cell in content.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            return cell.source.splitlines()[0].removeprefix("# ")
    return "fedmem"
