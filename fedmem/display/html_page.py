"""Executed notebooks as self-contained HTML pages: images and styles embedded, no scripts, no network access.

Formulas in the notebooks are plain Unicode, so they are readable everywhere without a renderer.
"""

import re
from pathlib import Path

PARAMETERS_NOTE = "parameters-note"  # tag of a cell of words about the cell of parameters that follows
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff;
  margin: 0 auto; max-width: 62rem; padding: 1rem; }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; } h2 { margin-top: 2rem; border-bottom: 1px solid #d0d7de; }
.anchor-link, .prompt { display: none; }
p, li, td, th { overflow-wrap: break-word; } a { overflow-wrap: anywhere; }
code { background: #f3f4f6; padding: .1em .3em; border-radius: 3px; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; line-height: 1.4; margin: .4rem 0; }
pre code { padding: 0; }
.highlight { background: #f6f8fa; padding: .4rem .7rem; border-radius: 6px; }
.output_html, .output_markdown, .text_cell_render { overflow-x: auto; }
.output_png img, img { max-width: 100%; height: auto; }
@media (max-width: 40rem) { /* figures keep a readable size and scroll in a box of their own */
  .output_png { overflow-x: auto; } .output_png img { max-width: none; width: 36rem; } }
.output_stderr pre, .output_error pre { background: #fff4f2; padding: .4rem .7rem; }
.celltag_parameters-note + .celltag_parameters { opacity: .5; } /* defaults that the run did not use */
table, th, td { border: 0; } /* pandas writes border="1" */
table { border-collapse: collapse; font-size: .85rem; margin: .5rem 0; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e3e6ea; vertical-align: top; }
thead th { border-bottom: 2px solid #8b949e; } tbody th { text-align: left; }
blockquote { margin: 1rem 0; padding: .3rem 1rem; border-left: 4px solid #b35900; background: #fff8ee; }
"""


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
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_title(content)}</title><style>{STYLE}{code_style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _title(content) -> str:
    """The notebook's first heading, escaped; "fedmem" without one."""
    from html import escape

    for cell in content.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            return escape(cell.source.splitlines()[0].removeprefix("# "))
    return "fedmem"
