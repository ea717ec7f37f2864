"""Generates the tables of the READMEs: notebooks in README.md, studies and parameters in params/README.md.

`python -m fedmem.cli.readme_tables` prints them; `--write` replaces each table in its document, which it finds by the
table's first line. A notebook's first cell holds its question, what it writes and how long it takes; a study's file
holds its title and its grid.
"""

import argparse
import json
import re
import sys
from typing import Any

from fedmem.config.stages import markdown_table
from fedmem.config.yaml_files import read
from fedmem.machine.paths import PACKAGE
from fedmem.results.identity import NOTEBOOKS, notebook_file

REPOSITORY = PACKAGE.parent
STUDIES = REPOSITORY / "params" / "studies"
# The main studies come first, in this order; then what `all` includes, then the others by name.
FIRST = ("demo", "own_data", "smollm2", "all")


def notebooks() -> str:
    """The table of notebooks: question, folder of the results and run time, one line per notebook, from its first cell.

    Raises ValueError when a notebook's first cell lacks its title, its table of facts or the folder that it writes.
    """
    rows = []
    for stage, name in NOTEBOOKS.items():
        text = "".join(json.loads(notebook_file(stage).read_text(encoding="utf-8"))["cells"][0]["source"])
        title = re.match(r"# \d+ · \w+: (.+)", text)
        facts = dict(re.findall(r"^\| (reads|writes|takes) \| (.+) \|$", text, flags=re.MULTILINE))
        folder = re.search(r"results/\w+/", facts.get("writes", ""))
        if title is None or folder is None or facts.keys() != {"reads", "writes", "takes"}:
            raise ValueError(
                f"notebooks/{name}.ipynb: the first cell needs a title '# N · Stage: question?' and a table of reads, "
                f"writes (with the folder, `results/…/`) and takes; it has {sorted(facts)}"
            )
        question = title[1][0].upper() + title[1][1:]
        rows.append((f"[{name}](notebooks/{name}.ipynb)", question, f"`{folder[0]}`", facts["takes"]))
    return _table(("notebook", "question", "writes", "takes"), rows)


def studies() -> str:
    """The table of studies: name, title, grid and base, one line per study of params/studies."""
    contents = {file.stem: read(file) for file in STUDIES.glob("*.yaml")}
    order = [*FIRST, *contents.get("all", {}).get("include", []), *sorted(contents)]
    rows = [
        (f"[{name}](studies/{name}.yaml)", contents[name]["title"], _grid(contents[name]), _base(contents[name]))
        for name in dict.fromkeys(order)  # a study appears once, where the order first has it
        if name in contents
    ]
    return _table(("study", "question", "grid", "base"), rows)


def _base(content: dict[str, Any]) -> str:
    return content.get("base") or ("theirs" if "include" in content else "defaults")


def _grid(content: dict[str, Any]) -> str:
    """What varies between a study's runs: `parameter`: values; names of points; included studies."""
    parts = [f"`{name}`: {', '.join(map(str, values))}" for name, values in content.get("grid", {}).items()]
    if "points" in content:
        parts.append(", ".join(content["points"]))
    if "include" in content:
        parts.append("includes " + ", ".join(content["include"]))
    return "; ".join(parts) or "one run"


def _table(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    # A pipe inside a cell ends the cell in Markdown, even within backticks.
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (heading, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heading), *lines[1:]])


def tables() -> dict[str, list[str]]:
    """All generated tables, by the document that holds them (its path from the repository's root)."""
    return {"README.md": [notebooks()], "params/README.md": [studies(), markdown_table()]}


def written(text: str, generated: list[str]) -> str:
    """The document `text` with the tables `generated` in place of its own; a table is found by its heading line.

    Raises ValueError when the document has no line that equals a table's heading. To add a table, put its heading line
    into the document.
    """
    lines = text.split("\n")
    for table in generated:
        new = table.split("\n")
        if new[0] not in lines:
            raise ValueError(f"no table begins with {new[0]!r}: write that line where the table belongs")
        begin = lines.index(new[0])
        # a table ends at the first line that is not one of its rows
        end = next((i for i in range(begin, len(lines)) if not lines[i].startswith("|")), len(lines))
        lines[begin:end] = new
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the generated tables, or write them into their documents."""
    parser = argparse.ArgumentParser(prog="python -m fedmem.cli.readme_tables", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="replace the tables in README.md and params/README.md")
    write = parser.parse_args(arguments).write
    for name, generated in tables().items():
        if write:
            file = REPOSITORY / name
            file.write_text(written(file.read_text(encoding="utf-8"), generated), encoding="utf-8")
        else:
            print(*generated, sep="\n\n", end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
