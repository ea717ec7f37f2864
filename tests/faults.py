"""Faults at random moments: kernels and runners killed, a full disk, a read-only folder, two runners at once.

`python tests/faults.py --kills 20 --log FILE` does it on the real notebooks with a small study and a line a fault; it
takes an hour. The tests do a few of each on notebooks that do next to nothing (test_faults.py). After every fault:
whatever has a manifest holds exactly what the manifest says, no process is left, the lock is free. In the end, one more
run gives the bytes of an undisturbed one.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml
from small_house import REPOSITORY, House, until

from fedmem.config.stages import STAGES
from fedmem.machine.paths import file_digest

WHO = ("kernel", "runner", "both", "front and runner")
STUDY = {
    "base": "small", "title": "Faults", "grid": {"decoding": ["top_k", "top_p"]},
    "parameters": {"algorithm": "fedavg", "rounds": 4, "local_epochs": 2, "train_rows": 12, "test_rows": 2,
                   "heldout_rows": 6, "n_prefixes": 6, "max_new_tokens": 30},
}  # fmt: skip


class RealHouse(House):
    """This very checkout with a small study, and results of its own."""

    def __init__(self, folder: Path):
        self.folder, self.results, self.acts, self.home = REPOSITORY, folder / "results", folder, folder / "home"
        for part in ("base", "tasks"):
            shutil.copytree(REPOSITORY / "params" / part, folder / "params" / part)
        self.study = folder / "params" / "studies" / "faults.yaml"
        self.study.parent.mkdir()
        self.study.write_text(yaml.safe_dump(STUDY))
        self.home.mkdir()


def published(results: Path) -> list[Path]:
    """Manifests of the finished stages and reports."""
    return [path for path in results.glob("*/[!.]*/manifest.json") if path.parent.parent.name in (*STAGES, "studies")]


def damage(results: Path) -> list[str]:
    """What a reader of finished stages would stumble over; [] when all that is published is whole."""
    found = []
    for manifest in published(results):
        folder = manifest.parent
        for name, digest in json.loads(manifest.read_text(encoding="utf-8"))["files"].items():
            if not (folder / name).is_file() or file_digest(folder / name) != digest:
                found.append(f"{folder / name} is not what was published")
        for page in folder.glob("*.html"):
            if page.name in ("notebook.html", "report.html") and not page.read_text("utf-8").endswith("</html>\n"):
                found.append(f"{page} is cut off")
        if (folder / "notebook.ipynb").is_file():
            json.loads((folder / "notebook.ipynb").read_text(encoding="utf-8"))
    for folder in results.glob("[!.]*/[!.]*/"):
        if folder.parent.name in STAGES and not (folder / "manifest.json").is_file():
            found.append(f"{folder} stands among the stages and has no manifest")
    return found


def digests(results: Path) -> dict[str, str]:
    """{published file: digest}: tables, JSON and weights, but for what tells how long something took."""
    found = {}
    for manifest in published(results):
        for name, digest in json.loads(manifest.read_text(encoding="utf-8"))["files"].items():
            if Path(name).suffix in (".parquet", ".json", ".safetensors") and not _tells_time(manifest.parent / name):
                found[f"{manifest.parent.relative_to(results)}/{name}"] = digest
    return found


def _tells_time(path: Path) -> bool:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return any("second" in name or "mib" in name for name in pyarrow.parquet.read_schema(path).names)
    return path.suffix == ".json" and "second" in path.read_text(encoding="utf-8")


def undisturbed(house: House) -> tuple[dict[str, str], dict[str, float]]:
    """(digests, seconds of each job) of a run that nothing disturbs."""
    done = house.run("run", house.study, "--cores", 1)
    assert done.returncode == 0, done.stderr
    (session,) = house.results.glob(".runner/*/jobs.json")
    ids = [job["id"] for job in json.loads(session.read_text(encoding="utf-8"))]
    moments = {id: [(session.parent / f"{id}.{name}").stat().st_mtime for name in ("started", "done")] for id in ids}
    return digests(house.results), {id: max(0.2, end - begin) for id, (begin, end) in moments.items()}


def kill(house: House, who: str, seconds: dict[str, float], among: random.Random) -> tuple[str, bool]:
    """Starts a run, kills at a moment of one of the jobs it has to do, sees to what is left.

    Returns what was done, and whether the run ended well nevertheless.
    """
    process = house.begin("run", house.study, "--cores", 1)
    until(lambda: process.poll() is not None or _session_of(house, process.pid), 300)
    about = _session_of(house, process.pid)
    if not about:  # the one before was killed when all was done
        return f"{process.communicate()[0].splitlines()[0]}", process.returncode == 0
    jobs = json.loads(Path(about["session"], "jobs.json").read_text(encoding="utf-8"))
    trainings = [job for job in jobs if job["stage"] == "train"]  # what can be resumed gets every other kill
    job = among.choice(trainings if trainings and among.random() < 0.5 else jobs)["id"]
    until(lambda: process.poll() is not None or Path(about["session"], f"{job}.started").exists(), 1800)
    delay = among.random() * seconds[job]
    time.sleep(delay)
    dead = []
    if who in ("kernel", "both"):
        dead += house.kernels()
    if who != "kernel":
        dead += [about["runner"]]
    if who == "front and runner":
        dead += [about["front"]]
    for pid in dead:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    said = process.communicate(timeout=1800)[1].strip().splitlines()
    until(lambda: not house.processes(), 30)
    found = damage(house.results)
    assert not found, found
    finished = len(published(house.results))
    told = next((line for line in said if line.startswith("fedmem:")), "nothing")
    ended = f"{finished} stages whole, exit {process.returncode}, said: {told[:110]}"
    return f"{who} killed {delay:.1f} s into {job}: {ended}", process.returncode == 0


def _session_of(house: House, front: int) -> dict:
    """What the lock says of the session that this process began; {} before it did."""
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((house.results / ".runner" / "lock").read_text(encoding="utf-8"))
        return about if about["front"] == front and "session" in about else {}
    return {}


def kills(house: House, expected: dict[str, str], seconds: dict[str, float], number: int, seed: int, log) -> None:
    """Kills one after the other on one results folder, which is begun anew whenever all is done and compared."""
    log(f"undisturbed: {len(expected)} files to compare, {sum(seconds.values()):.0f} s in {len(seconds)} jobs")
    among, count = random.Random(seed), 0
    while count < number:
        line, ended_well = kill(house, WHO[count % len(WHO)], seconds, among)
        count += "killed" in line
        log(f"{count}: {line}")
        if ended_well:
            compare(house, expected, log)
            shutil.rmtree(house.results)
    done = house.run("run", house.study, "--cores", 1)
    assert done.returncode == 0, done.stderr
    compare(house, expected, log)


def compare(house: House, expected: dict[str, str], log) -> None:
    """Are these the bytes of an undisturbed run? AssertionError names the files that are not."""
    found = digests(house.results)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    differing = [name for name in expected if found[name] != expected[name]]
    assert not differing, differing
    log(f"rerun: all {len(expected)} files have the undisturbed bytes")


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of its own, of that size, mounted at a folder; needs the rights to mount."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        until(lambda: subprocess.run(["umount", str(folder)], stderr=subprocess.DEVNULL).returncode == 0, 30)


def can_mount() -> bool:
    """Has this process the rights, and the kernel's leave, to mount a file system?"""
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode == 0
        if made:
            subprocess.run(["umount", folder], check=True)
    return made


def full_disks(house: House, expected: dict[str, str], left_kilobytes: list[int], log) -> None:
    """Runs on a disk that fills up, with ever more space left; then on one with enough."""
    with small_disk(house.results, 64_000):
        for left in left_kilobytes:
            space = shutil.disk_usage(house.results).free - left * 1024
            filler = house.results / "filler"
            filler.write_bytes(bytes(max(0, space)))
            done = house.run("run", house.study, "--cores", 1)
            found = damage(house.results)
            assert done.returncode, f"a run with {left} KB left on the disk ended well"
            assert "No space left" in done.stderr, done.stderr
            assert not found, found
            until(lambda: not house.processes(), 30)
            filler.unlink()
            line = next(line for line in done.stderr.splitlines() if "No space left" in line)
            log(f"disk full with {left} KB left: exit {done.returncode}, said: {line.strip()[:140]}")
        done = house.run("run", house.study, "--cores", 1)
        assert done.returncode == 0, done.stderr
        compare(house, expected, log)


def read_only(house: House, log) -> None:
    """Runs on results that nobody may write to, half of them made; looking at them works."""
    with small_disk(house.results, 64_000):
        house.act("train", "raise SystemError('as far as it goes')")
        assert house.run("run", house.study, "--cores", 1).returncode == 1
        house.act("train", "")
        subprocess.run(["mount", "-o", "remount,ro", str(house.results)], check=True)
        done = house.run("run", house.study, "--cores", 1)
        assert done.returncode == 2, done.stderr
        assert f"{house.results} cannot be written to" in done.stderr, done.stderr
        shown = house.run("status", house.study)
        assert "nothing runs" in shown.stdout, shown.stderr
        assert not damage(house.results)
        subprocess.run(["mount", "-o", "remount,rw", str(house.results)], check=True)
        assert house.run("run", house.study, "--cores", 1).returncode == 0
        log(f"read-only results: exit 2, said: {done.stderr.strip()[:140]}")


def several_at_once(house: House, expected: dict[str, str], log) -> None:
    """Several runs started at the same moment: one works, the others are refused, and the bytes are the same."""
    started = [house.begin("run", house.study, "--cores", 1) for _ in range(3)]
    ended = [(process, *process.communicate(timeout=1800)) for process in started]
    codes = sorted(process.returncode for process, *_ in ended)
    refused = [err for process, _, err in ended if process.returncode == 2]
    assert codes == [0, 2, 2], [err for *_, err in ended]
    assert all("another `fedmem run`" in err for err in refused)
    assert not damage(house.results)
    compare(house, expected, log)
    log(f"three runners at once: exits {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="where to write a line a fault, beside the screen")
    arguments = parser.parse_args()

    def log(line: str) -> None:
        print(line, flush=True)
        if arguments.log:
            with arguments.log.open("a", encoding="utf-8") as lines:
                lines.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    with tempfile.TemporaryDirectory(prefix="fedmem-faults-") as folder:
        real = RealHouse(Path(folder))
        expected, seconds = undisturbed(real)
        shutil.rmtree(real.results)
        kills(real, expected, seconds, arguments.kills, arguments.seed, log)
    with tempfile.TemporaryDirectory(prefix="fedmem-faults-") as folder:
        small = House(Path(folder))
        expected, _ = undisturbed(small)
        shutil.rmtree(small.results)
        several_at_once(small, expected, log)
        shutil.rmtree(small.results)
        if can_mount():
            full_disks(small, expected, [0, 20, 60, 150, 300], log)
            small.results.rmdir()
            read_only(small, log)
        else:
            log("a full disk, a read-only folder: left out, for nothing can be mounted here")


if __name__ == "__main__":
    sys.exit(main())
